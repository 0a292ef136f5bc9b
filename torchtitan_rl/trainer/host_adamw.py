"""AdamW whose moments are in the host's memory: 8 bytes a parameter that the GPU does not hold."""

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torchtitan.components.optimizer import OptimizersContainer

from torchtitan_rl.device import DEVICE_TYPE, ON_CPU
from torchtitan_rl.models.hf import local_shard

MOMENTS = ("exp_avg", "exp_avg_sq")
BUCKET_BYTES = 2**28
"""Most bytes of the moments that are computed with at once. A parameter with more is a bucket of its own."""


class HostAdamW(torch.optim.AdamW):
    """torch's AdamW with its moments in pinned memory of the host. State dict and results are the same, bit by bit.

    A step computes with a bucket of moments on the device, while one stream fetches the next and another returns the one before.
    Their memory is the computing stream's, which waits for both before it gives memory out: no more than two buckets have any.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self._device = torch.get_device_module(DEVICE_TYPE)
        self._inward, self._outward = self._device.Stream(), self._device.Stream()
        if not ON_CPU:  # otherwise a pinned tensor takes the next power of two
            torch._C._accelerator_setAllocatorSettings("pinned_max_round_threshold_mb:1")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Take a step with all parameters that have a gradient. The host waits for nothing."""
        computing = self._device.current_stream()
        for group in self.param_groups:
            fetched: list[Tensor] = []
            buckets = _buckets([p for p in group["params"] if p.grad is not None])
            for bucket, following in pairwise([[], *buckets, []]):
                moments = fetched
                computing.wait_stream(self._inward)
                computing.wait_stream(self._outward)
                fetched = [torch.empty_like(p) for p in following for _ in MOMENTS]
                self._copy(self._inward, self._on_host(following), fetched)
                self._compute(group, bucket, moments)
                self._copy(self._outward, moments, self._on_host(bucket))
            computing.wait_stream(self._outward)

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's state dict when the last step's moments are on the host: its tensors are read and written in place."""
        self._device.synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but moments stay where they are: torch would move all of them to the device."""
        state = state_dict["state"]
        steps = {number: {"step": values["step"]} for number, values in state.items()}
        super().load_state_dict({**state_dict, "state": steps})
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in state:
                self.state[parameter] |= {name: state[number][name] for name in MOMENTS}

    def _on_host(self, bucket: Sequence[Tensor]) -> list[Tensor]:
        """Returns the moments of a bucket, two for each parameter; zeros before its first step."""
        for p in bucket:
            if not self.state[p]:
                zeros = {"device": "cpu", "pin_memory": not ON_CPU}
                moments = {name: torch.zeros_like(p, **zeros) for name in MOMENTS}
                step = torch.zeros((), dtype=torch.float32, device=p.device)
                self.state[p] = {"step": step, **moments}
        return [self.state[p][name] for p in bucket for name in MOMENTS]

    def _copy(self, stream: Any, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Have `stream` copy tensors after all that the computing stream has been given so far."""
        stream.wait_stream(self._device.current_stream())
        with self._device.stream(stream):
            for source, target in zip(sources, targets, strict=True):
                local_shard(target).copy_(local_shard(source), non_blocking=True)

    def _compute(
        self, group: dict[str, Any], bucket: list[Tensor], moments: Sequence[Tensor]
    ) -> None:
        names = ("lr", "weight_decay", "eps", "amsgrad", "maximize", "fused")
        options = {name: group[name] for name in names}
        beta1, beta2 = group["betas"]
        steps = [self.state[p]["step"] for p in bucket]
        gradients = [p.grad for p in bucket]
        averages = moments[::2], moments[1::2]
        adamw(bucket, gradients, *averages, [], steps, beta1=beta1, beta2=beta2, **options)


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Divides parameters, in their order, into buckets of at most BUCKET_BYTES of moments."""
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        size += len(MOMENTS) * local_shard(parameter).nbytes
        if bucket and size > BUCKET_BYTES:
            yield bucket
            bucket, size = [], len(MOMENTS) * local_shard(parameter).nbytes
        bucket.append(parameter)
    yield bucket


class HostOptimizers(OptimizersContainer):
    """torchtitan's container with HostAdamW for AdamW."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> type[HostAdamW]:
        return HostAdamW
