"""The transport to engines on ranks of their own: the weights over the link, and what those ranks answer."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchtitan_rl.device import DEVICE_TYPE
from torchtitan_rl.generator.generator import Generator
from torchtitan_rl.link import Link, Order
from torchtitan_rl.models.lora.adapters import Lora
from torchtitan_rl.sync.engine_weights import Shapes
from torchtitan_rl.sync.in_process import InProcess, Weights
from torchtitan_rl.types import FloatArray, IntArray


class OtherRanks:
    """The trainers' side. Its methods are those of `InProcess`, for all engines at once."""

    asleep = False

    def __init__(
        self,
        link: Link,
        dtype: torch.dtype,
        lora: Lora | None,
        shapes: Shapes,
        adapter_shapes: Shapes,
    ) -> None:
        """`dtype`: of the engines' weights."""
        self._link, self.dtype = link, dtype
        self._has_adapter = lora is not None
        self._step = 0
        both = {"shapes": dict(shapes), "adapter_shapes": dict(adapter_shapes)}
        link.call(self._step, "engines", "connect", **both)

    def send(
        self, base: Weights | None, adapter: Weights, *, policy_version: int
    ) -> dict[str, int]:
        """See `InProcess.send`. The first trainer's rank sends each block as it is gathered."""
        self._step = policy_version
        asked = {"sends_base": base is not None, "policy_version": policy_version}
        self._link.order(Order(self._step, "engines", "receive", asked))
        if base is not None:
            self._link.send(base)
        if self._has_adapter:
            self._link.send(adapter)
        return self._link.answer()

    def copies(self, side: int, *, packed: bool) -> Tensor:
        """See `InProcess.copies`."""
        return self._ask("copies", side=side, packed=packed).to(DEVICE_TYPE)

    def checksums(self, side: int, *, packed: bool) -> Tensor:
        """See `InProcess.checksums`."""
        return self._ask("checksums", side=side, packed=packed).to(DEVICE_TYPE)

    def faults(self) -> dict[str, str]:
        """See `InProcess.faults`."""
        return self._ask("faults")

    def logprobs(self, probe: IntArray) -> list[FloatArray]:
        """See `InProcess.logprobs`."""
        return self._ask("logprobs", probe=probe)

    def _ask(self, question: str, **arguments: Any) -> Any:
        asked = {"question": question, "arguments": arguments}
        return self._link.call(self._step, "engines", "ask", **asked)


class OrderedEngine:
    """The generators' side: carries out `OtherRanks`' orders with this rank's engine."""

    def __init__(self, link: Link, generator: Generator, lora: Lora | None) -> None:
        self._link, self._lora = link, lora
        self._connect = partial(InProcess, generator, lora)

    def connect(self, shapes: Shapes, adapter_shapes: Shapes) -> None:
        self._engine = self._connect(shapes, adapter_shapes)

    def receive(self, *, sends_base: bool, policy_version: int) -> dict[str, int]:
        base = self._link.receive() if sends_base else None
        adapter = self._link.receive() if self._lora else ()
        return self._engine.send(base, adapter, policy_version=policy_version)

    def ask(self, question: str, arguments: dict[str, Any]) -> Any:
        """Returns what this method of `InProcess` returns, on the CPU."""
        answer = getattr(self._engine, question)(**arguments)
        return answer.cpu() if isinstance(answer, Tensor) else answer
