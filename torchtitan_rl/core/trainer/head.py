"""The policy's output module. It scores tokens where it has the gathered weight, so that no [T, V] logits leave it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard
from torchtitan.models.common.linear import Linear

from torchtitan_rl.core.trainer.divergence import Divergence, TeacherOutput, chunked_divergence
from torchtitan_rl.core.trainer.logprobs import chunked_logprobs


class LogprobHead(Linear):
    """An `lm_head` that returns log-probability and entropy, [B*L] each, instead of [B, L, V] logits inside
    `scoring(...)`.

    It is the model's output module. It runs once per forward inside the hooks of FSDP2 and tensor parallelism, with its
    weight gathered, so callers need no knowledge of sharding.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        chunk_tokens: int = 1024
        """Tokens of a tile of logits."""

        compile: bool = False
        """torch.compile the passes over each tile of logits."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.chunk_tokens = config.chunk_tokens
        self.compile_chunks = config.compile
        self._target: tuple[Tensor, float, Tensor | None] | None = None
        self._teacher: tuple[TeacherOutput, float] | None = None
        self._teaches = False

    @contextmanager
    def scoring(
        self, labels: Tensor, temperature: float, at: Tensor | None = None
    ) -> Iterator[None]:
        """Within this context `forward` scores `labels` [B*L] at the sampling temperature.

        Args:
            at: [M] the positions to score; None: all. Other positions get 0 and no logits.
        """
        self._target = labels, temperature, at
        try:
            yield
        finally:
            self._target = None

    @contextmanager
    def comparing(self, teacher: TeacherOutput, beta: float) -> Iterator[None]:
        """Within this context and `scoring`, `forward` also returns a `Divergence` from the teacher, [B*L].

        Args:
            teacher: of the M positions to score.
            beta: as `chunked_divergence`.
        """
        self._teacher = teacher, beta
        try:
            yield
        finally:
            self._teacher = None

    @contextmanager
    def teaching(self) -> Iterator[None]:
        """Within this context and `scoring`, `forward` returns the `TeacherOutput` of the M positions instead."""
        self._teaches = True
        try:
            yield
        finally:
            self._teaches = False

    def forward(self, input: Tensor) -> Tensor | tuple[Tensor, ...] | TeacherOutput:
        """[B, L, D] -> [B, L, V] logits, or two or four of [B*L] inside `scoring`."""
        if self._target is None:
            return super().forward(input)
        labels, temperature, at = self._target
        hidden, weight, group, first = input, self.weight, None, 0
        if isinstance(weight, DTensor):
            # Tensor parallel: this rank holds some rows of the vocabulary, as torch.chunk deals them.
            mesh = weight.device_mesh
            group = mesh.get_group()
            first = min(mesh.get_local_rank() * -(-len(weight) // mesh.size()), len(weight))
            weight = weight.to_local(grad_placements=[Shard(0)])  # [Vs, D]
            # [B, L, D], its gradient summed over ranks
            hidden = hidden.to_local(grad_placements=[Partial()])
        hidden = hidden.flatten(0, 1)  # [B*L, D]
        hidden = hidden if at is None else hidden.index_select(0, at)  # [M, D]
        weight = weight.to(hidden.dtype)
        if self._teaches:
            return TeacherOutput(hidden, weight, temperature)
        scores = chunked_logprobs(
            hidden,
            weight,
            labels if at is None else labels[at],
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            group=group,
            first_row=first,
            compile=self.compile_chunks,
        )
        if self._teacher is not None:
            scores += self._divergence(hidden, weight, temperature, group, first)
        if at is None:
            return scores  # [B*L] each
        return tuple(s.new_zeros(len(labels)).index_copy(0, at, s) for s in scores)  # [B*L] each

    def _divergence(
        self,
        hidden: Tensor,
        weight: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        first_row: int,
    ) -> Divergence:
        """hidden [M, D], weight [Vs, D] -> the divergence from the teacher, [M], over the rows that both heads have.

        A head may be padded with rows of no token, and a family's sizes are padded differently.
        """
        teacher, beta = self._teacher
        rows = min(len(weight), len(teacher.weight))
        return chunked_divergence(
            hidden,
            weight if len(weight) == rows else weight[:rows],
            teacher._replace(weight=teacher.weight[:rows]),
            beta=beta,
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            group=group,
            first_row=first_row,
        )
