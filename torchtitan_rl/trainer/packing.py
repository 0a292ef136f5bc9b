"""Packs whole sequences into one row of tokens: a micro-batch. Each trace of a sequence is a segment of the row."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchtitan_rl.algorithm.losses.loss import REFERENCE_LOGPROBS
from torchtitan_rl.device import DEVICE_TYPE
from torchtitan_rl.errors import UserError
from torchtitan_rl.types import (
    NO_RECORD,
    Episode,
    FloatArray,
    Member,
    Normalizers,
    RecordArray,
    SegmentLayout,
    TrainBatch,
)


def count_work(members: Sequence[Member], *, share_prompts: bool) -> tuple[int, int, int]:
    """Returns one micro-batch's tokens, pairs of a token and one it attends to (or itself), and tokens in the loss.

    A shared prompt counts once: see `pack`.
    """
    tokens = pairs = 0
    for segment in _laid_out(members, share_prompts):
        tokens += segment.length - segment.shared
        pairs += _pairs(segment.length) - _pairs(segment.shared)
    num_sampled = sum(member.episode.completion.num_sampled for member in members)
    return tokens, pairs, num_sampled


def _pairs(length: int) -> int:
    """Pairs of a token and one it attends to, or itself, among the first `length` tokens of a sequence."""
    return length * (length + 1) // 2


class _Segment(NamedTuple):
    """One trace, as a segment of a pack."""

    sequence: int
    """Index of its member, whose traces are one sequence for the loss."""
    span: slice
    """The place of its tokens among its member's: those of the prompt, then the completion's."""
    num_context: int
    """The tokens before its completion: the prompt's, or the context's of a later trace."""
    shared: int = 0
    """Tokens, its first, that it shares with another segment of the pack, which holds them."""
    root: int | None = None
    """Index of that segment; None if it shares no tokens."""

    @property
    def length(self) -> int:
        """Its tokens, shared ones included."""
        return self.span.stop - self.span.start

    @property
    def own(self) -> slice:
        """The place of the tokens that the pack holds for it, as `span`."""
        return slice(self.span.start + self.shared, self.span.stop)


def _laid_out(members: Sequence[Member], share_prompts: bool) -> list[_Segment]:
    """Returns the members' traces in their order in the pack, which is the same with and without `share_prompts`.

    Example: a member with traces a1 and a2, and one of the same prompt with b1 -> a1, b1, a2.
    """
    laid_out: list[_Segment] = []
    for _, siblings in groupby(enumerate(members), lambda pair: pair[1].prompt.prompt_idx):
        firsts: list[_Segment] = []
        later: list[_Segment] = []
        for i, member in siblings:
            num_prompt = len(member.prompt.token_ids)
            completion = member.episode.completion
            first, *others = completion.spans
            firsts.append(_Segment(i, slice(0, num_prompt + first.stop), num_prompt))
            for trace, span in zip(completion.traces[1:], others, strict=True):
                place = slice(num_prompt + span.start, num_prompt + span.stop)
                later.append(_Segment(i, place, trace.context_tokens))
        traces = firsts + later
        laid_out += _sharing(traces, members, len(laid_out)) if share_prompts else traces
    return laid_out


def _sharing(
    traces: Sequence[_Segment], members: Sequence[Member], place: int
) -> Iterator[_Segment]:
    """Yields the traces of one prompt, of which the first is the pack's segment `place`, with the tokens that each shares.

    A trace shares the beginning of its context with the earlier one that has most of it, if that is a quarter at least. Otherwise
    it shares nothing, and later ones may share with it. The context's last token is not shared, because it predicts a different
    token in each completion.
    """
    roots: dict[int, np.ndarray] = {}  # [length] each, the tokens of those that share nothing
    for index, trace in enumerate(traces, place):
        tokens = members[trace.sequence].token_ids[trace.span]  # [length]
        context = tokens[: trace.num_context]  # [num_context]
        common = {root: _num_common(context[:-1], of_root) for root, of_root in roots.items()}
        nearest = max(common, key=common.__getitem__, default=None)
        if nearest is not None and 4 * common[nearest] >= len(context):
            yield trace._replace(shared=common[nearest], root=nearest)
        else:
            roots[index] = tokens
            yield trace


def _num_common(tokens: np.ndarray, others: np.ndarray) -> int:
    """Returns the number of tokens with which both begin."""
    most = min(len(tokens), len(others))
    differing = np.flatnonzero(tokens[:most] != others[:most])
    return int(differing[0]) if len(differing) else most


def pack(
    members: Sequence[Member],
    *,
    normalizers: Normalizers,
    multiple: int,
    share_prompts: bool = False,
    columns: Sequence[str] = (),
) -> TrainBatch:
    """Returns one micro-batch, padded to a positive multiple of `multiple` tokens.

    Padding forms segments of its own without a loss. No segment of padding is longer than the longest trace, so that attention
    needs no wider rows. An empty micro-batch consists of padding only.

    Args:
        share_prompts: store a prompt's tokens once for neighbours that have it, and a beginning that traces of one prompt have
            in common. All but the first of them then start with the first token that differs, else the prompt's or context's
            last one, at its position there (see SegmentLayout).
        columns: names in `Credit.columns` or `Credit.token_columns` that the batch gets too (`Loss.reads`). An empty
            micro-batch has each in both.
    """
    segments = _laid_out(members, share_prompts)
    # [segments], those of `SegmentLayout.of` before padding
    own_lengths = np.array([one.length - one.shared for one in segments], dtype=np.int64)
    filled, longest = int(own_lengths.sum()), max((one.length for one in segments), default=0)
    padding_lengths = _padding_lengths(filled, longest, multiple)
    row = _Row(members, segments, own_lengths, sum(padding_lengths))
    episodes = [member.episode for member in members]
    completions = [episode.completion for episode in episodes]

    def at_labels(values: Iterable[np.ndarray]) -> Tensor:
        """Values [L] of each member's completion tokens -> [T] float32."""
        return _on_device(row.at_labels([*values]))

    token_ids = row.joined([member.token_ids for member in members], np.int64)  # [T]
    loss_mask = row.at_labels([completion.loss_mask for completion in completions])  # [T]
    group_ids = np.array([member.prompt.prompt_idx for member in members], dtype=np.int64)  # [S]
    owners = [*(segment.sequence for segment in segments), len(members)]  # padding is the last
    sequence_ids = np.repeat(owners, [*own_lengths, row.padding])  # [T]
    batch = TrainBatch(
        token_ids=_on_device(token_ids),
        labels=_on_device(_shifted(token_ids, own_lengths)),
        layout=SegmentLayout.of(
            [*own_lengths, *padding_lengths],
            {i: (one.root, one.shared) for i, one in enumerate(segments) if one.root is not None},
            device=DEVICE_TYPE,
            padding=row.padding,
        ),
        loss_mask=_on_device(loss_mask),
        loss_positions=_on_device(np.flatnonzero(loss_mask)),
        sampler_logprobs=at_labels(completion.sampler_logprobs for completion in completions),
        advantages=at_labels(token_advantages(episode) for episode in episodes),
        sequence_ids=_on_device(sequence_ids),
        group_ids=_on_device(group_ids),
        members=[*members],
        normalizers=normalizers,
    )
    _add_optional(batch, row, at_labels)
    for name in columns:
        _add_column(batch, name, at_labels)
    return batch


def _add_optional(
    batch: TrainBatch, row: "_Row", at_labels: Callable[[Iterable[np.ndarray]], Tensor]
) -> None:
    """Add what only some batches have: the sampler's records, which tokens are fresh, the reference's log-probabilities."""
    episodes = [member.episode for member in batch.members]
    if any(episode.completion.sampler_records is not None for episode in episodes):
        batch.sampler_records = _on_device(row.records())
    if any(episode.completion.token_versions is not None for episode in episodes):
        batch.fresh_mask = at_labels(episode.completion.fresh_mask for episode in episodes)
    if episodes and all(episode.reference_logprobs is not None for episode in episodes):
        batch.reference_logprobs = at_labels(episode.reference_logprobs for episode in episodes)


def _add_column(
    batch: TrainBatch, name: str, at_labels: Callable[[Iterable[np.ndarray]], Tensor]
) -> None:
    """Add a column of the members' credit. Raises UserError if the loss has not set it in all of them."""
    if name == REFERENCE_LOGPROBS:  # no credit: `batch.reference_logprobs`
        return
    credits = [member.episode.credit for member in batch.members]
    by_token = all(name in credit.token_columns for credit in credits)
    by_sequence = all(name in credit.columns for credit in credits)
    if not by_token and not by_sequence:
        raise UserError(
            f"algorithm.loss: it asks the batch for the column {name!r}, which an episode in the loss has not. Set it in "
            "assign_credit for each: episode.credit.columns for [S], token_columns for [T]."
        )
    if by_token:
        batch.token_columns[name] = at_labels(credit.token_columns[name] for credit in credits)
    if by_sequence:
        values = np.array([credit.columns[name] for credit in credits], dtype=np.float32)  # [S]
        batch.columns[name] = _on_device(values)


def by_member(batch: TrainBatch, values: FloatArray) -> list[FloatArray]:
    """Divides values [..., M] at `loss_positions` among the members: [..., num_sampled] each, in their tokens' order."""
    parts: list[list[FloatArray]] = [[] for _ in batch.members]
    end = 0
    for segment in _laid_out(batch.members, share_prompts=False):
        member = batch.members[segment.sequence]
        mask = _after_prompt(member, member.episode.completion.loss_mask)  # [Lp + L]
        begin, end = end, end + np.count_nonzero(mask[segment.span])
        parts[segment.sequence].append(values[..., begin:end])
    assert end == values.shape[-1]
    return [np.concatenate(of_traces, axis=-1) for of_traces in parts]


def completion_values(batch: TrainBatch, values: FloatArray) -> list[FloatArray]:
    """Returns `by_member`'s parts of values [M] at the tokens of the completions: [L] each, 0 outside the loss."""
    values_of_members: list[FloatArray] = []
    for member, of_member in zip(batch.members, by_member(batch, values), strict=True):
        mask = member.episode.completion.loss_mask  # [L]
        at_tokens = np.zeros(len(mask), values.dtype)  # [L]
        at_tokens[mask] = of_member
        values_of_members.append(at_tokens)
    return values_of_members


class _Row(NamedTuple):
    """The traces of one micro-batch, one after another, and padding."""

    members: Sequence[Member]
    segments: list[_Segment]
    own_lengths: np.ndarray
    """[segments] tokens of each that the row holds; shared ones are those of another."""
    padding: int
    """Tokens of padding at its end."""

    def at_labels(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Values [L] of each member's completion tokens -> [T] float32, each at the position that predicts the token, 0
        elsewhere.

        Example: a prompt of 2 tokens and values [1, 2] give [0, 1, 2, 0].
        """
        with_prompts = [*map(_after_prompt, self.members, values)]  # [Lp + L] each
        return _shifted(self.joined(with_prompts, np.float32), self.own_lengths)

    def records(self) -> RecordArray:
        """What the sampler recorded at each token of the row: [T, R], NO_RECORD on padding and where it recorded
        nothing."""
        recorded = [member.episode.completion.sampler_records for member in self.members]
        width = next(rows.shape[1] for rows in recorded if rows is not None)
        size = int(self.own_lengths.sum()) + self.padding
        of_row = np.full((size, width), NO_RECORD, dtype=np.uint8)  # [T, R]
        ends = np.cumsum(self.own_lengths)  # [segments]
        for segment, begin, end in zip(self.segments, ends - self.own_lengths, ends, strict=True):
            rows = recorded[segment.sequence]
            if rows is not None:
                of_row[begin:end] = rows[segment.own]
        return of_row

    def joined(self, values: Sequence[np.ndarray], dtype: type) -> np.ndarray:
        """Values [Lp + L] of each member's tokens -> [T], 0 on padding."""
        parts = [values[segment.sequence][segment.own] for segment in self.segments]
        return np.concatenate([*parts, np.zeros(self.padding)], dtype=dtype, casting="unsafe")


def _after_prompt(member: Member, values: np.ndarray) -> np.ndarray:
    """Values [L] of a member's completion tokens -> [Lp + L], 0 at the prompt's."""
    return np.concatenate([np.zeros(len(member.prompt.token_ids), values.dtype), values])


def token_advantages(episode: Episode) -> FloatArray:
    """[L], float32 or float64: the advantage of each sampled token of the completion; 0 for other tokens."""
    credit, mask = episode.credit, episode.completion.loss_mask  # mask: [L]
    if credit.token_advantages is not None:
        return credit.token_advantages * mask
    if credit.turn_advantages is None:
        return credit.advantage * mask
    turns = episode.completion.turns
    # By trace, then by time, as the tokens are: sorting is stable.
    order = sorted(range(len(turns)), key=lambda i: turns[i].trace)
    of_turns = [credit.turn_advantages[i] for i in order]
    lengths = [turns[i].num_tokens for i in order]
    advantages = np.zeros(len(mask))  # [L]
    advantages[mask] = np.repeat(of_turns, lengths)
    return advantages


def _padding_lengths(filled: int, longest: int, multiple: int) -> list[int]:
    """Lengths of the segments of padding after `filled` tokens, none longer than `longest`, the longest trace.

    Example: 300 tokens, the longest trace 60 of them, and multiple 128 -> [60, 24].
    """
    padding = -filled % multiple if filled else multiple
    padding_lengths: list[int] = []
    while padding > 0:
        padding_lengths.append(min(longest or padding, padding))
        padding -= padding_lengths[-1]
    return padding_lengths


def _shifted(values: np.ndarray, own_lengths: np.ndarray) -> np.ndarray:
    """Returns the next token's value in the same segment, [T] -> [T]; 0 at each segment's end and on padding."""
    shifted = np.append(values[1:], 0).astype(values.dtype)
    shifted[np.cumsum(own_lengths) - 1] = 0
    shifted[int(own_lengths.sum()) :] = 0
    return shifted


def _on_device(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).to(DEVICE_TYPE)
