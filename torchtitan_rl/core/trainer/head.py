"""The policy's output module. It answers a question where it has the gathered weight, so that no [T, V] logits leave it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard
from torchtitan.models.common.linear import Linear


class HeadInput(NamedTuple):
    """What the logits of T tokens are computed from: scale * hidden weight^T."""

    hidden: Tensor
    """[T, D] the head's input."""
    weight: Tensor
    """[Vs, D] this rank's rows of the vocabulary, in the dtype of `hidden`."""
    group: dist.ProcessGroup | None
    """The tensor-parallel ranks that hold the other rows; None if `weight` is the whole vocabulary."""
    first_row: int
    """The token of this rank's first row."""
    scale: float


class LogprobHead(Linear):
    """An `lm_head` that answers the question of `asked(...)` instead of returning [B, L, V] logits.

    It is the model's output module. It runs once per forward inside the hooks of FSDP2 and tensor parallelism, with its
    weight gathered, so callers need no knowledge of sharding.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        chunk_tokens: int = 1024
        """Tokens of a tile of logits."""

        compile: bool = False
        """torch.compile the passes over each tile of logits."""

    scale = 1.0
    """The constant by which the model multiplies its logits."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.chunk_tokens = config.chunk_tokens
        self.compile_chunks = config.compile
        self._question: Callable[[HeadInput], Any] | None = None

    @contextmanager
    def asked(self, question: Callable[[HeadInput], Any]) -> Iterator[None]:
        """Within this context the model's forward returns what `question` makes of the head's input."""
        self._question = question
        try:
            yield
        finally:
            self._question = None

    def forward(self, input: Tensor) -> Any:
        """[B, L, D] -> the answer to the question, or without one [B, L, V] logits."""
        if self._question is None:
            logits = super().forward(input)  # [B, L, V]
            return logits if self.scale == 1 else logits * self.scale
        hidden, weight, group, first_row = input, self.weight, None, 0
        if isinstance(weight, DTensor):
            # Tensor parallel: this rank holds some rows of the vocabulary, as torch.chunk deals them.
            mesh = weight.device_mesh
            group = mesh.get_group()
            first_row = min(mesh.get_local_rank() * -(-len(weight) // mesh.size()), len(weight))
            weight = weight.to_local(grad_placements=[Shard(0)])  # [Vs, D]
            # [B, L, D], its gradient summed over ranks
            hidden = hidden.to_local(grad_placements=[Partial()])
        hidden = hidden.flatten(0, 1)  # [B*L, D]
        weight = weight.to(hidden.dtype)
        return self._question(HeadInput(hidden, weight, group, first_row, self.scale))
