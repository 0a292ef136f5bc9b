"""Asks a model for the log-probabilities and entropies of packed tokens: one forward, without [T, V] logits.

The model's output module computes them where it has its gathered weight, and so they come out of the model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.linear import Linear

from torchtitan_rl.models.experts import PackedQwen3
from torchtitan_rl.models.logprobs import chunked_logprobs
from torchtitan_rl.types import Episode, Group, SegmentLayout, TrainBatch

Result = TypeVar("Result")


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
    """The constant by which the model multiplies its logits."""


class LogprobHead(Linear):
    """An `lm_head`. Inside `computing(f)` it returns, and so does the model, f(HeadInput) in place of [1, T, V] logits.

    It is the model's output module. It runs once per forward inside the hooks of FSDP2 and tensor parallelism, with its
    weight gathered, so callers need no knowledge of sharding.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        chunk_tokens: int = 1024
        """Tokens of a tile of logits."""

        compile: bool = False
        """torch.compile the passes over each tile of logits."""

        scale: float = 1.0
        """The constant by which the model multiplies its logits."""

        reads_records: bool = True
        """Whether the sampler's records are the tokens that it kept, over which log-probabilities are normalised."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.config = config
        self._function: Callable[[HeadInput], Any] | None = None

    @contextmanager
    def computing(self, function: Callable[[HeadInput], Any]) -> Iterator[None]:
        """Set what `forward` returns within this context: `function` of the head's input."""
        self._function = function
        try:
            yield
        finally:
            self._function = None

    def forward(self, input: Tensor) -> Any:
        """[1, T, D] -> the result of `computing`'s function."""
        hidden, weight, group, first_row = input, self.weight, None, 0
        if isinstance(weight, DTensor):
            # Tensor parallel: this rank holds some rows of the vocabulary, as torch.chunk deals them.
            mesh = weight.device_mesh
            group = mesh.get_group()
            vocab_size = len(weight)  # all ranks' rows
            rows_per_rank = -(-vocab_size // mesh.size())
            first_row = min(mesh.get_local_rank() * rows_per_rank, vocab_size)
            weight = weight.to_local(grad_placements=[Shard(0)])  # [Vs, D]
            # [1, T, D], its gradient summed over ranks
            hidden = hidden.to_local(grad_placements=[Partial()])
        hidden = hidden.flatten(0, 1)  # [T, D]
        weight = weight.to(hidden.dtype)
        return self._function(HeadInput(hidden, weight, group, first_row, self.config.scale))


class TokenScores(NamedTuple):
    """What a forward says of T labels; 0 at the positions that were not asked for."""

    logprobs: Tensor
    """[T] log pi(label) at the sampling temperature."""
    entropy: Tensor
    """[T] H(pi) in nats."""
    columns: dict[str, Tensor] = {}
    """[T] each, by name: what a `Companion` reads of the head; empty without one."""

    def each(self, change: Callable[[Tensor], Tensor]) -> "TokenScores":
        """The same with every tensor changed."""
        columns = {name: change(values) for name, values in self.columns.items()}
        return TokenScores(change(self.logprobs), change(self.entropy), columns)

    def spread(self, positions: Tensor, size: int) -> "TokenScores":
        """[M] -> [size]: the values at `positions` [M], and 0 elsewhere."""
        return self.each(lambda values: values.new_zeros(size).index_copy(0, positions, values))

    def at(self, positions: Tensor) -> "TokenScores":
        """[T] -> [M]: the values at `positions` [M], without gradient."""
        return self.each(lambda values: values.detach()[positions])


HeadReader = Callable[[HeadInput], dict[str, Tensor]]
"""Returns columns [M] of the policy's head at M wanted positions, by name."""


class Companion(Protocol):
    """A frozen model that each forward of the policy is compared with, such as `trainer.teachers.exact_teacher.ExactTeacher`."""

    columns: Sequence[str]
    """Names of what it measures of each token, in `Credit.token_columns`."""

    def reader(self, batch: TrainBatch) -> HeadReader:
        """Run its own forward over a micro-batch. Returns what reads the policy's head at `batch.loss_positions`."""

    def free(self) -> None:
        """Free what the policy's backward reads of it."""

    def measure(self, groups: Sequence[Group[Episode]]) -> dict[str, float]:
        """Returns means over held-out samples, by name. Collective."""


def score(
    model: Decoder,
    token_ids: Tensor,
    labels: Tensor,
    layout: SegmentLayout,
    temperature: float,
    only: Tensor | None = None,
    records: Tensor | None = None,
    *,
    reader: HeadReader | None = None,
) -> TokenScores:
    """Returns log pi(label) and entropy at the sampling temperature, and the columns of `reader` if there is one.

    Args:
        token_ids, labels: [T] int64.
        layout: the places of the segments.
        only: [M] int64, the positions whose results are wanted; the others are 0 and take no work. None: all.
        records: [T, R] uint8, what the sampler recorded (`TrainBatch.sampler_records`), for the head if it
            `reads_records`, or else for the model; None: nothing.
        reader: gets the head's input at the wanted positions alone.
    """
    head = model.lm_head.config
    kept = None  # [M, V / 8]
    if head.reads_records and records is not None:
        kept = _at(records, only)
        records = None

    def token_scores(head_input: HeadInput) -> TokenScores:
        hidden, weight, group, first_row, scale = head_input
        hidden = _at(hidden, only)  # [M, D]
        logprobs, entropy = chunked_logprobs(
            hidden,
            weight,
            _at(labels, only),
            kept=kept,
            # softmax(scale * z / temperature): to scale the temperature, and not `hidden`, avoids a rounding.
            temperature=temperature / scale,
            chunk_tokens=head.chunk_tokens,
            group=group,
            first_row=first_row,
            compile=head.compile,
        )  # [M] each
        columns = reader(head_input._replace(hidden=hidden)) if reader else {}  # [M] each
        found = TokenScores(logprobs, entropy, columns)
        return found if only is None else found.spread(only, len(labels))

    return run_model(model, token_ids, layout, token_scores, records)


def _at(tensor: Tensor, only: Tensor | None) -> Tensor:
    """The rows [M, ...] of a tensor [T, ...]; all of them for None."""
    return tensor if only is None else tensor.index_select(0, only)


def forget_forwards(model: Decoder) -> None:
    """Tell FSDP2 that no backward follows the forwards so far, and reshard all weights.

    It keeps the embedding and the head gathered, in the forward's dtype, until a backward. They would take memory, and a
    checkpoint would store these rounded copies instead of the master weights. The next backward would gather the head once
    more, for the forward that has none.
    """
    model.reset_iter_state()


def run_model(
    model: Decoder,
    token_ids: Tensor,
    layout: SegmentLayout,
    of_head: Callable[[HeadInput], Result],
    records: Tensor | None = None,
) -> Result:
    """One forward of the packed tokens. The model returns what its head makes of its input with `of_head`."""
    masks = attention_masks(model, layout)
    if isinstance(model, PackedQwen3):
        model.see_pack(layout, records)
    # The decoder ends with `return lm_head(hidden)`. Inside `computing` that is of_head(HeadInput(...)).
    with model.lm_head.computing(of_head):
        return model(token_ids[None], layout.positions[None], masks)


def attention_masks(model: Decoder, layout: SegmentLayout) -> NamedTuple:
    """Returns the `attention_masks` argument of the model's forward for a layout."""
    return model.config.first_attention.inner_attention.masks(layout)
