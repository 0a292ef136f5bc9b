"""Metrics of one micro-batch, gathered on the device and brought to the host in one transfer."""

import torch
from torch import Tensor

from torchtitan_rl.types import Metric


class Tally:
    """Collects 0-d tensors and turns them into `Metric`s whose merge over micro-batches and ranks is exact."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Tensor, str, Tensor]] = {}

    def mean(self, key: str, values: Tensor, mask: Tensor) -> None:
        """The mean of `values` where `mask` is not 0 (same shape), weighted by how many there are."""
        count = mask.sum()
        total = torch.where(mask > 0, values, 0.0).sum()
        self._entries[key] = (total / count.clamp(min=1), "mean", count)

    def weighted_mean(self, key: str, value: Tensor, weight: Tensor) -> None:
        """A 0-d mean that stands for `weight` units."""
        self._entries[key] = (value, "mean", weight)

    def max(self, key: str, values: Tensor, mask: Tensor) -> None:
        """The largest of `values` where `mask` is not 0 (same shape)."""
        if values.numel() > 0:
            largest = torch.where(mask > 0, values, float("-inf")).max()
            self._entries[key] = (largest, "max", mask.sum())

    def min(self, key: str, values: Tensor, mask: Tensor) -> None:
        """The smallest of `values` where `mask` is not 0 (same shape)."""
        if values.numel() > 0:
            smallest = torch.where(mask > 0, values, float("inf")).min()
            self._entries[key] = (smallest, "min", mask.sum())

    def sum(self, key: str, value: Tensor) -> None:
        """A 0-d count, kept even when it is 0."""
        self._entries[key] = (value, "sum", torch.ones_like(value))

    def to_metrics(self) -> dict[str, Metric]:
        """All as floats; a mean or extreme over nothing is left out, never reported as 0."""
        if not self._entries:
            return {}
        values = [value for value, _, _ in self._entries.values()]
        weights = [weight for _, _, weight in self._entries.values()]
        flat = torch.stack([number.detach().double() for number in values + weights]).tolist()  # one transfer
        half = len(values)
        return {
            key: Metric(value=flat[i], reduction=reduction, weight=flat[half + i])
            for i, (key, (_, reduction, _)) in enumerate(self._entries.items())
            if flat[half + i] > 0
        }
