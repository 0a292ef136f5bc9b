"""The transport to engines on ranks of their own: the weights over the link, and what those ranks answer."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torchtitan_rl.events import phase
from torchtitan_rl.link import Link, Order
from torchtitan_rl.models.lora.adapters import Lora
from torchtitan_rl.sync.engine_weights import Shapes
from torchtitan_rl.sync.in_process import Weights


class OtherRanks:
    """The trainers' side. Its methods are those of `InProcess`, for all engines at once."""

    asleep = False

    def __init__(self, link: Link, lora: Lora | None, shapes: Shapes) -> None:
        """`shapes`: of the policy's weights."""
        self._link, self._lora, self._step = link, lora, 0
        with phase("wait for the generators' engines"):
            self.dtype = link.call(0, "connect", shapes=shapes)

    def send(
        self, base: Weights | None, adapter: Weights, *, policy_version: int
    ) -> dict[str, int]:
        """See `InProcess.send`. The first trainer's rank sends each block as it is gathered."""
        self._step = policy_version
        asked = {"sends_base": base is not None, "policy_version": policy_version}
        self._link.order(Order(self._step, "receive", asked))
        if base is not None:
            self._link.send(base)
        if self._lora:
            self._link.send(adapter)
        return self._link.answer()

    def __getattr__(self, question: str) -> Callable[..., Any]:
        """Every other method of `InProcess`, with keywords alone, asks the engines' ranks for what it returns there."""
        return partial(self._link.call, self._step, "ask", question=question)
