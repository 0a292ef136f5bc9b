"""The exact divergence between a policy and its teacher over the whole vocabulary, without [T, V] logits.

Notation as in logprobs.py: T tokens, D hidden size (Dt the teacher's), Vs vocabulary rows on this tensor-parallel
rank, tiles of C tokens by R vocabulary rows. About eight tiles of 4 C R bytes exist at once, and both heads' logits
are computed three times: for the normalisers, for the sum over the vocabulary and for the gradient.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_rl.models.logprobs import (
    CPU_ROWS,
    GPU_TILE,
    all_reduce,
    partial_product,
    product,
    slices,
    wide,
)

TILES = 8
"""Tiles that exist at once. On a GPU they share the memory that logprobs.py gives to a few."""


class TeacherOutput(NamedTuple):
    """What the divergence reads of the teacher: its logits are hidden weight^T / temperature."""

    hidden: Tensor
    """[T, Dt] the head's input."""
    weight: Tensor
    """[Vs, Dt] this rank's rows of its head, the same tokens as the student's."""
    temperature: float | None = None
    """None: the student's. They differ if a model scales its logits."""


class _Constants(NamedTuple):
    """The arguments of `chunked_divergence` that are not tensors."""

    beta: float
    temperature: float
    teacher_temperature: float
    chunk_tokens: int
    chunk_rows: int
    group: dist.ProcessGroup | None
    first_row: int


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a || b) over a tile's rows of the vocabulary, [C, R] each -> [C].

    Over the whole vocabulary the terms b - a add up to 0. With them no term is negative, so large terms do not
    cancel, and a normaliser's rounding changes the sum by the same fraction only.
    """
    a = log_a.exp()  # [C, R]
    b = log_b.exp()  # [C, R]
    terms = (log_a - log_b) * a + (b - a)  # [C, R]
    return terms.sum(-1)  # [C]


def _log_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """log ((1 - beta) p + beta q), [C, R]."""
    return torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))  # [C, R]


def _divergence(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Returns a tile's terms, [C] each, of the divergence and of the student's KL, which the gradient needs."""
    if beta == 0:
        forward = _kl(log_q, log_p)  # [C]
        return forward, forward
    if beta == 1:
        reverse = _kl(log_p, log_q)  # [C]
        return reverse, reverse
    log_m = _log_mixture(log_p, log_q, beta)  # [C, R]
    of_teacher = _kl(log_q, log_m)  # [C]
    of_student = _kl(log_p, log_m)  # [C]
    return beta * of_teacher + (1 - beta) * of_student, of_student


def _gradient(log_p: Tensor, log_q: Tensor, of_student: Tensor, beta: float) -> Tensor:
    """dD / dz of a tile's scaled logits z of the student, [C, R]. `of_student`: [C, 1]."""
    p = log_p.exp()  # [C, R]
    if beta == 0:
        return p - log_q.exp()
    if beta == 1:
        return p * (log_p - log_q - of_student)
    log_m = _log_mixture(log_p, log_q, beta)  # [C, R]
    return (1 - beta) * p * (log_p - log_m - of_student)


class _ChunkedDivergence(torch.autograd.Function):
    """The divergence of each token; its gradient goes to the student's hidden states and weight.

    With a sharded vocabulary each rank holds the same rows of both heads. The results are the same on every rank, and
    the gradient to `hidden` is this rank's term of a sum over ranks.
    """

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, teacher: TeacherOutput, constants: _Constants
    ) -> tuple[Tensor, Tensor]:
        """hidden [T, D], weight [Vs, D] -> the divergence of each token and the teacher's best, [T] each."""
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        # [2, T] of student and teacher
        log_totals = hidden.new_full((2, len(hidden)), -math.inf, dtype=torch.float64)
        highest = hidden.new_full((len(hidden),), -math.inf, dtype=dtype)  # [T]
        best = torch.full_like(highest, -1, dtype=torch.int64)  # [T]
        for rows in slices(len(weight), constants.chunk_rows):
            for tokens, *logits in _tiles(hidden, weight, teacher, rows, constants):
                for total, z in zip(log_totals, logits, strict=True):
                    of_tile = z.logsumexp(-1).double()  # [C]
                    total[tokens] = torch.logaddexp(total[tokens], of_tile)
                high, place = logits[1].max(-1)  # [C] each
                place += constants.first_row + rows.start
                best[tokens] = torch.where(high > highest[tokens], place, best[tokens])
                highest[tokens] = torch.maximum(high, highest[tokens])
        best = _best_of_ranks(highest, best, constants.group)
        log_totals = _sum_of_ranks(log_totals, constants.group).to(dtype)  # [2, T]
        # [2, T] the divergence and the student's KL
        sums = hidden.new_zeros(2, len(hidden), dtype=torch.float64)
        for rows in slices(len(weight), constants.chunk_rows):
            for tokens, *logits in _tiles(hidden, weight, teacher, rows, constants):
                log_p, log_q = _normalized(logits, log_totals[:, tokens])  # [C, R] each
                terms = _divergence(log_p, log_q, constants.beta)  # [C] each
                sums[:, tokens] += torch.stack(terms)
        divergence, of_student = all_reduce(sums, constants.group).to(dtype)  # [T] each
        ctx.save_for_backward(hidden, weight, *teacher[:2], log_totals, of_student)
        ctx.constants = constants
        ctx.mark_non_differentiable(best)
        return divergence, best

    @staticmethod
    def backward(ctx, g_divergence: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient to the [T] result -> this rank's gradients to hidden [T, D] and weight [Vs, D]."""
        hidden, weight, *teacher, log_totals, of_student = ctx.saved_tensors
        constants: _Constants = ctx.constants
        scale = g_divergence[:, None] / constants.temperature  # [T, 1]
        grad_hidden = torch.zeros_like(hidden, dtype=log_totals.dtype)  # [T, D]
        learns = ctx.needs_input_grad[1]  # a frozen head's weight has no gradient
        grad_weight = torch.empty_like(weight) if learns else None  # [Vs, D]
        for rows in slices(len(weight), constants.chunk_rows):
            grad_block = torch.zeros_like(weight[rows], dtype=log_totals.dtype)  # [R, D]
            for tokens, *logits in _tiles(hidden, weight, TeacherOutput(*teacher), rows, constants):
                log_p, log_q = _normalized(logits, log_totals[:, tokens])  # [C, R] each
                students = of_student[tokens, None]  # [C, 1]
                grad_logits = _gradient(log_p, log_q, students, constants.beta)  # [C, R]
                grad_logits = grad_logits.mul_(scale[tokens]).to(hidden.dtype)
                grad_hidden[tokens] += partial_product(grad_logits, weight[rows])  # [C, D]
                if learns:
                    grad_block += partial_product(grad_logits.T, hidden[tokens])  # [R, D]
            if learns:
                grad_weight[rows] = grad_block
        return grad_hidden.to(hidden.dtype), grad_weight, None, None


def _tiles(
    hidden: Tensor, weight: Tensor, teacher: TeacherOutput, rows: slice, constants: _Constants
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields the tiles of all tokens with these local rows of the vocabulary: (tokens, the student's logits, the
    teacher's).

    Logits are [C, R], divided by their temperatures.
    """
    ours, block = wide(hidden), wide(weight[rows]).T  # [T, D], [D, R]
    theirs, their_block = wide(teacher.hidden), wide(teacher.weight[rows]).T  # [T, Dt], [Dt, R]
    for tokens in slices(len(hidden), constants.chunk_tokens):
        z = product(ours[tokens], block).div_(constants.temperature)  # [C, R]
        target = product(theirs[tokens], their_block).div_(constants.teacher_temperature)  # [C, R]
        yield tokens, z, target


def _normalized(logits: list[Tensor], log_totals: Tensor) -> list[Tensor]:
    """Logits of student and teacher [C, R], overwritten, and their log-sums [2, C] -> log-probabilities, [C, R] each."""
    student, teacher = logits
    of_student, of_teacher = log_totals[:, :, None]  # [C, 1] each
    return [student.sub_(of_student), teacher.sub_(of_teacher)]


def _sum_of_ranks(log_totals: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns log Σ exp over the ranks, elementwise. A rank without rows has -inf."""
    peak = all_reduce(log_totals.clone(), group, dist.ReduceOp.MAX)
    total = all_reduce((log_totals - peak).exp(), group)
    return peak + total.log()


def _best_of_ranks(highest: Tensor, best: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Each rank's largest logit and its token, [T] each -> the token of the largest of all, [T]."""
    peak = all_reduce(highest.clone(), group, dist.ReduceOp.MAX)
    candidates = best.masked_fill(highest < peak, -1)  # [T]
    return all_reduce(candidates, group, dist.ReduceOp.MAX)


def chunked_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher: TeacherOutput,
    *,
    beta: float = 1.0,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    chunk_rows: int | None = None,
    group: dist.ProcessGroup | None = None,
    first_row: int = 0,
) -> tuple[Tensor, Tensor]:
    """Returns each token's divergence of pi = softmax(hidden weight^T / temperature) from the teacher's nu, [T], differentiable in
    `hidden` and `weight` but not in the teacher; and the teacher's most likely token, [T] int64.

    Args:
        hidden: [T, D]; weight: [Vs, D], this rank's rows of the vocabulary. The hidden sizes may differ.
        beta: 1: the reverse KL(pi || nu); 0: the forward KL(nu || pi); between: the generalised Jensen-Shannon
            divergence beta KL(nu || M) + (1 - beta) KL(pi || M) with M = (1 - beta) pi + beta nu.
        chunk_tokens: tokens of a tile of logits.
        chunk_rows: vocabulary rows of a tile; None: as many as GPU_TILE allows, or CPU_ROWS.
        group: the tensor-parallel ranks that hold the other rows; None if `weight` is the whole vocabulary.
        first_row: the token of this rank's first row.
    """
    assert len(weight) == len(teacher.weight)
    if chunk_rows is None:
        on_gpu = max(GPU_TILE // (TILES // 2 * chunk_tokens), 1)
        chunk_rows = on_gpu if hidden.is_cuda else CPU_ROWS
    temperatures = (temperature, teacher.temperature or temperature)
    constants = _Constants(beta, *temperatures, chunk_tokens, chunk_rows, group, first_row)
    return _ChunkedDivergence.apply(hidden, weight, teacher, constants)
