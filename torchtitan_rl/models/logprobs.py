"""Log-probabilities and entropies from hidden states, without [T, V] logits.

Notation: T tokens, D hidden size, V vocabulary, Vs vocabulary rows on this tensor-parallel rank. Logits exist as
tiles of C tokens by R vocabulary rows. Temporaries in bytes:
  4 C R         each of two tiles; in the backward also one tile in the operands' dtype
  4 R D, 4 T D  sums of the backward
  4 R D, 4 T D  on a CPU with bfloat16: a block of the weight and the hidden states in float32
  24 T          statistics of each of the Vs / R blocks, in the forward
  4 T Vs        on a CPU: the logits that the backward reads, up to CPU_KEPT
The gradient of the weight has the weight's dtype.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

LOG2_E = math.log2(math.e)

GPU_TILE = 2**26
"""Logits in a tile on a GPU: 256 MiB. The host launches about 30 kernels for a tile, so few large tiles are faster
than many that would stay in the GPU's cache."""

CPU_ROWS = 1024
"""Vocabulary rows of a tile that stays in a CPU's cache."""

CPU_KEPT = 2**27
"""Logits that a CPU keeps for the backward, which computes others again: 512 MiB."""

DROPPED = -1e30
"""The logit of a token that the sampler did not keep. It is finite, because a tile of them alone would otherwise be NaN."""


def all_reduce(
    t: Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """Reduces `t` in place over the ranks of a group, if there is one, and returns it."""
    if group is not None:
        dist.all_reduce(t, op=op, group=group)
    return t


def wide(t: Tensor) -> Tensor:
    """Returns a factor for `product`. On a CPU bfloat16 becomes float32: it has no product with a wider result."""
    return t if t.is_cuda or t.dtype != torch.bfloat16 else t.float()


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b [K, N] with sums and result in float32 (float64 for float64 operands).

    A plain product of bfloat16 operands rounds its result to bfloat16: steps of 0.125 for logits from 16 to 32.
    """
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32)


def _statistics(logits: Tensor, sharpness: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (peak, rest, weighted), [C] each, of a tile of logits [C, R], which is overwritten.

    With u = (logits - peak) / temperature, rest = Σ exp(u) - 1 and weighted = Σ u exp(u). `rest` is in float64, because it
    may be tiny compared with 1. All terms of `weighted` have the same sign, so nothing cancels. `sharpness` is
    log2(e) / temperature, for exp2, which takes a quarter of exp's time on a CPU.
    """
    peak = logits.amax(-1)  # [C]
    exponent = logits.sub_(peak[:, None]).mul_(sharpness)  # [C, R] u, in units of log 2
    e = exponent.exp2()  # [C, R]
    rest = e.sum(-1, dtype=torch.float64) - 1  # [C], the peak's own term is exactly 1
    weighted = exponent.mul_(e).sum(-1)  # [C], in units of log 2
    return peak, rest, weighted.double() / LOG2_E


def _gradient(
    logits: Tensor,
    sharpness: float,
    peak: Tensor,
    log_total: Tensor,
    g_logprob: Tensor,
    entropy: Tensor | None = None,
    g_entropy: Tensor | None = None,
) -> Tensor:
    """Returns -p * (g_logprob + g_entropy * (log p + H)) in place of a tile of logits [C, R]. The others are [C, 1]; the last two
    are None for an entropy without gradient."""
    exponent = logits.sub_(peak).mul_(sharpness)  # [C, R]
    if g_entropy is None:
        return exponent.exp2_().mul_(-g_logprob * torch.exp(-log_total))  # [C, R]
    p = exponent.exp2().mul_(torch.exp(-log_total))  # [C, R]
    log_p = exponent.div_(LOG2_E).sub_(log_total)  # [C, R]
    slope = log_p.add_(entropy).mul_(g_entropy).add_(g_logprob)  # [C, R]
    return slope.mul_(p).neg_()  # [C, R]


# Compiled at the first call: one pass over the tile instead of several.
_compiled_statistics = torch.compile(_statistics)
_compiled_gradient = torch.compile(_gradient)


class _Constants(NamedTuple):
    """The arguments of `chunked_logprobs` that have no gradient."""

    kept: Tensor | None
    temperature: float
    chunk_tokens: int
    chunk_rows: int
    group: dist.ProcessGroup | None
    first_row: int
    compile: bool


def slices(size: int, step: int) -> list[slice]:
    """Returns 0 to `size` in slices of `step`; the last may be shorter."""
    begins = range(0, size, step)
    return [slice(begin, min(begin + step, size)) for begin in begins]


def _tiles(
    labels: Tensor, rows: slice, constants: _Constants
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields the tiles of all tokens with these local rows of the vocabulary: (tokens, in_tile, label_row).

    in_tile: [C] bool, whether the label is one of these rows. label_row: [C, 1], the label's index among them, or 0.
    """
    for tokens in slices(len(labels), constants.chunk_tokens):
        label_row = labels[tokens] - (constants.first_row + rows.start)  # [C]
        in_tile = (label_row >= 0) & (label_row < rows.stop - rows.start)  # [C]
        yield tokens, in_tile, torch.where(in_tile, label_row, 0)[:, None]


def _drop(logits: Tensor, tokens: slice, rows: slice, constants: _Constants) -> None:
    """Give the tokens that the sampler did not keep the logit DROPPED, in a tile of logits [C, R]."""
    if constants.kept is None:
        return
    first, end = constants.first_row + rows.start, constants.first_row + rows.stop
    of_bytes = constants.kept[tokens, first // 8 : -(-end // 8), None]  # [C, B, 1]
    bits = of_bytes >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1  # [C, B, 8]
    bits = bits.flatten(1)[:, first % 8 :][:, : end - first]  # [C, R]
    logits.masked_fill_(bits == 0, DROPPED)


class _ChunkedLogprobs(torch.autograd.Function):
    """log p(label) and the entropy of softmax(h W^T / temperature), computed tile by tile in forward and backward.

    With z the scaled logits of a token, p = softmax(z) and H its entropy:
      d log p(y) / dz = onehot(y) - p        dH / dz = -p * (log p + H)
    The backward reuses the forward's peak and log-sum, and computes again the logits that were not kept. The outer loop is
    over blocks of the vocabulary: each block of the weight is widened once, and its gradient is complete at the end of the
    block. With a sharded vocabulary each rank holds rows [first_row, first_row + Vs) of W. The results are the same on
    every rank, and the gradient to `hidden` is this rank's term of a sum over ranks.
    """

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, labels: Tensor, constants: _Constants
    ) -> tuple[Tensor, Tensor]:
        """hidden [T, D], weight [Vs, D], labels [T] -> log-probability and entropy, [T] each."""
        ctx.set_materialize_grads(False)
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        statistics = _compiled_statistics if constants.compile else _statistics
        sharpness = LOG2_E / constants.temperature
        operand = wide(hidden)  # [T, D]
        blocks = slices(len(weight), constants.chunk_rows)
        # [3, blocks, T] peak, rest and weighted of each block
        of_blocks = hidden.new_empty(3, len(blocks), len(hidden), dtype=torch.float64)
        # [T] the label's logit if this rank has it
        label_logit = hidden.new_zeros(len(hidden), dtype=torch.float64)
        has_label = torch.zeros_like(label_logit, dtype=torch.bool)  # [T]
        ctx.logits = []  # [C, R] each, of the first tiles
        room = 0 if hidden.is_cuda or not ctx.needs_input_grad[0] else CPU_KEPT
        for i, rows in enumerate(blocks):
            block = wide(weight[rows])  # [R, D]
            for tokens, in_tile, label_row in _tiles(labels, rows, constants):
                logits = product(operand[tokens], block.T)  # [C, R]
                _drop(logits, tokens, rows, constants)
                # Before `statistics` overwrites the logits.
                room -= logits.numel()
                if room >= 0:
                    ctx.logits.append(logits.clone())
                at_label = logits.gather(-1, label_row)[:, 0]  # [C]
                label_logit[tokens] += torch.where(in_tile, at_label, 0)
                has_label[tokens] |= in_tile
                of_tile = statistics(logits, sharpness)  # [C] each
                for whole, values in zip(of_blocks, of_tile, strict=True):
                    whole[i, tokens] = values
        peak, log_total, entropy = _combine(of_blocks, constants)  # [T] each
        below_peak = torch.where(has_label, label_logit - peak, 0)  # [T]
        below_peak = all_reduce(below_peak, constants.group)  # [T]
        logprobs = (below_peak / constants.temperature - log_total).to(dtype)  # [T]
        kept = [values.to(dtype) for values in (peak, log_total, entropy)]  # [T] each
        ctx.save_for_backward(hidden, weight, labels, *kept)
        ctx.constants = constants
        return logprobs, kept[-1]

    @staticmethod
    def backward(
        ctx, g_logprobs: Tensor | None, g_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Gradients to the two [T] results -> this rank's gradients to hidden [T, D] and weight [Vs, D]."""
        hidden, weight, labels, peak, log_total, entropy = ctx.saved_tensors
        constants: _Constants = ctx.constants
        g_logprobs = torch.zeros_like(peak) if g_logprobs is None else g_logprobs  # [T]
        of_tokens = [peak, log_total, g_logprobs]  # [T] each
        if g_entropy is not None:  # by default the loss does not read the entropy
            of_tokens += [entropy, g_entropy]
        gradient = _compiled_gradient if constants.compile else _gradient
        sharpness = LOG2_E / constants.temperature
        operand = wide(hidden)  # [T, D]
        grad_hidden = torch.zeros_like(hidden, dtype=peak.dtype)  # [T, D]
        learns = ctx.needs_input_grad[1]  # a frozen head's weight has no gradient
        grad_weight = torch.empty_like(weight) if learns else None  # [Vs, D]
        for rows in slices(len(weight), constants.chunk_rows):
            block = wide(weight[rows])  # [R, D]
            grad_block = torch.zeros_like(weight[rows], dtype=peak.dtype)  # [R, D]
            for tokens, in_tile, label_row in _tiles(labels, rows, constants):
                if ctx.logits:
                    logits = ctx.logits.pop(0)  # [C, R]
                else:
                    logits = product(operand[tokens], block.T)  # [C, R]
                    _drop(logits, tokens, rows, constants)
                of_tile = [values[tokens, None] for values in of_tokens]  # [C, 1] each
                grad_logits = gradient(logits, sharpness, *of_tile)  # [C, R]
                at_label = torch.where(in_tile[:, None], g_logprobs[tokens, None], 0)  # [C, 1]
                grad_logits.scatter_add_(-1, label_row, at_label)
                grad_logits = grad_logits.to(hidden.dtype)
                grad_hidden[tokens] += partial_product(grad_logits, weight[rows])  # [C, D]
                if learns:
                    grad_block += partial_product(grad_logits.T, hidden[tokens])  # [R, D]
            if learns:
                grad_weight[rows] = grad_block.div_(constants.temperature)
        return grad_hidden.div_(constants.temperature).to(hidden.dtype), grad_weight, None, None


def partial_product(a: Tensor, b: Tensor) -> Tensor:
    """One tile's term of a gradient, summed in float32. On a CPU bfloat16 factors give a sum rounded to bfloat16."""
    return product(a, b) if a.is_cuda else a @ b


def _combine(of_blocks: Tensor, constants: _Constants) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks' (peak, rest, weighted) [3, blocks, T] -> peak, log Σ exp(u) and entropy, [T] each.

    A block's sums are relative to its own peak. They are rescaled to the highest peak of all blocks and ranks. The
    result is the same on every rank. The entropy is log Σ exp(u) - Σ u exp(u) / Σ exp(u), with u = (logits - peak) /
    temperature for that peak. Neither term is negative.
    """
    block_peak, rest, weighted = of_blocks  # [blocks, T] each
    peak = all_reduce(block_peak.amax(0), constants.group, dist.ReduceOp.MAX)  # [T]
    drop = (block_peak - peak) / constants.temperature  # [blocks, T], at most 0
    scale = drop.exp()  # [blocks, T]
    at_peak = drop == 0  # [blocks, T]
    rests = torch.where(at_peak, rest, scale * (1 + rest)).sum(0)  # [T]
    weights = scale * (weighted + (1 + rest) * drop)  # [blocks, T]
    weights = weights.sum(0)  # [T]
    ties = at_peak.sum(0).double()  # [T] blocks whose peak is the highest
    sums = torch.stack([rests, ties, weights])  # [3, T]
    rest, ties, weighted = all_reduce(sums, constants.group)  # [T] each
    rest = rest + (ties - 1)  # [T], Σe - 1
    log_total = rest.log1p()  # [T]
    return peak, log_total, log_total - weighted / (1 + rest)


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    kept: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    chunk_rows: int | None = None,
    group: dist.ProcessGroup | None = None,
    first_row: int = 0,
    compile: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns log p(label) and the entropy of p = softmax(hidden weight^T / temperature), [T] each, differentiable.

    Args:
        hidden: [T, D]; weight: [Vs, D], the vocabulary rows [first_row, first_row + Vs); labels: [T] global token ids.
        kept: [T, V / 8] uint8, a bit for each token of the whole vocabulary; p is 0 where it is 0. None: all are 1.
        chunk_tokens: tokens of a tile of logits.
        chunk_rows: vocabulary rows of a tile; None: as many as GPU_TILE allows, or CPU_ROWS.
        group: the tensor-parallel ranks that hold the other rows; None if `weight` is the whole vocabulary.
        compile: make one compiled pass over each tile of logits. The values are equal up to rounding.
    """
    if chunk_rows is None:
        chunk_rows = max(GPU_TILE // chunk_tokens, 1) if hidden.is_cuda else CPU_ROWS
    constants = _Constants(kept, temperature, chunk_tokens, chunk_rows, group, first_row, compile)
    return _ChunkedLogprobs.apply(hidden, weight, labels, constants)
