"""Log-probabilities and entropies straight from hidden states: [T, V] logits never exist for T tokens at once.

Notation: T tokens, D hidden size, V vocabulary, Vs the vocabulary rows on this tensor-parallel rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard
from torchtitan.models.common.linear import Linear


def _all_reduce(t: Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    if group is not None:
        dist.all_reduce(t, op=op, group=group)
    return t


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b [K, N] with every sum and the result in float32 (float64 for float64 operands).

    A product of bfloat16 operands rounds its result to bfloat16: steps of 0.125 for logits from 16 to 32.
    """
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()  # a CPU has no product with a wider result


def _statistics(z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of logits z [C, Vs], turned in place into z - peak: the peak, and with e = exp(z - peak) three sums; [C] each.

    `below` sums e over the entries below the peak and `ties` counts those at it, apart because below may be too small to
    be seen beside 1; `weighted` sums e * (z - peak), which has one sign, so nothing cancels.
    """
    peak = z.max(-1).values  # [C]
    z.sub_(peak[:, None])  # [C, Vs]
    lower = z < 0  # [C, Vs]
    exp = z.exp().mul_(lower)  # [C, Vs]
    below = exp.sum(-1)  # [C]
    ties = (z.shape[1] - lower.sum(-1)).to(z.dtype)  # [C]
    return peak, below, ties, exp.mul_(z).sum(-1)


def _gradient(
    z: Tensor, peak: Tensor, log_total: Tensor, entropy: Tensor, g_logprob: Tensor, g_entropy: Tensor
) -> Tensor:
    """In place of logits z [C, Vs]: -p * (g_logprob + g_entropy * (log p + H)); the others are [C, 1]."""
    logp = z.sub_(peak).sub_(log_total)  # [C, Vs]
    p = logp.exp()  # [C, Vs]
    return logp.add_(entropy).mul_(g_entropy).add_(g_logprob).mul_(p).neg_()  # [C, Vs]


# One pass over the chunk each, where a dozen run otherwise; compiled at the first call.
_compiled_statistics = torch.compile(_statistics)
_compiled_gradient = torch.compile(_gradient)


class _Constants(NamedTuple):
    temperature: float
    chunk: int
    group: dist.ProcessGroup | None
    first: int
    compile: bool


class _ChunkedLogprobs(torch.autograd.Function):
    """log p(label) and entropy of softmax(h W^T / temperature), chunk by chunk, forward and backward.

    With z the scaled logits of a token, p = softmax(z) and H its entropy:
      d log p(y) / dz = onehot(y) - p        dH / dz = -p * (log p + H)
    The backward recomputes each chunk's logits and takes peak and log-sum from the forward, so memory is two chunks of
    [C, Vs]. With a sharded vocabulary each rank holds rows [first, first + Vs) of W; the returned values are the same on
    every rank, and the gradient to `hidden` is this rank's part of a sum over ranks.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, constants: _Constants) -> Tensor:  # noqa: ANN001
        """hidden [T, D], weight [Vs, D], labels [T] -> [T, 2]: log-probability and entropy."""
        T = hidden.shape[0]
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        out = hidden.new_empty(T, 2, dtype=dtype)  # [T, 2]
        norm = hidden.new_empty(T, 2, dtype=dtype)  # [T, 2]: peak and log Σ exp(z - peak)
        statistics = _compiled_statistics if constants.compile else _statistics
        for begin in range(0, T, constants.chunk):
            part = slice(begin, begin + constants.chunk)
            z = _logits(hidden[part], weight, constants.temperature)  # [C, Vs]
            mine, row = _local_labels(labels[part], constants.first, weight.shape[0])  # [C], [C]
            chosen = torch.where(mine, z.gather(-1, row[:, None])[:, 0], 0)  # [C]
            out[part], norm[part] = _combine(statistics(z), chosen, mine, constants.group)
        ctx.save_for_backward(hidden, weight, labels, norm, out)
        ctx.constants = constants
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN001
        """grad [T, 2] -> this rank's gradient to hidden [T, D] and weight [Vs, D]."""
        hidden, weight, labels, norm, out = ctx.saved_tensors
        constants: _Constants = ctx.constants
        grad_hidden = torch.empty_like(hidden)  # [T, D]
        grad_weight = torch.zeros_like(weight, dtype=out.dtype)  # [Vs, D], summed over chunks in full precision
        gradient = _compiled_gradient if constants.compile else _gradient
        for begin in range(0, hidden.shape[0], constants.chunk):
            part = slice(begin, begin + constants.chunk)
            z = _logits(hidden[part], weight, constants.temperature)  # [C, Vs]
            g_logprob, g_entropy = grad[part].split(1, -1)  # [C, 1] each
            dz = gradient(z, *norm[part].split(1, -1), out[part, 1:], g_logprob, g_entropy)  # [C, Vs]
            mine, row = _local_labels(labels[part], constants.first, weight.shape[0])  # [C], [C]
            dz.scatter_add_(-1, row[:, None], torch.where(mine[:, None], g_logprob, 0))
            dz = _scaled(dz, constants.temperature).to(hidden.dtype)  # [C, Vs]
            grad_hidden[part] = dz @ weight  # [C, D]
            grad_weight += _product(dz.T, hidden[part])  # [Vs, D]
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """hidden [C, D], weight [Vs, D] -> logits at the temperature [C, Vs], not rounded to bfloat16."""
    return _scaled(_product(hidden, weight.T), temperature)


def _scaled(t: Tensor, temperature: float) -> Tensor:
    return t if temperature == 1.0 else t.div_(temperature)


def _combine(
    statistics: tuple[Tensor, ...], chosen: Tensor, mine: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Each rank's `_statistics` [C] of its part of the vocabulary -> (log-probability, entropy) and (peak, log-sum), [C, 2].

    A rank's sums are relative to its own peak; here they become relative to the highest of all. The result is the same on
    every rank. Entropy is log Σe - Σ e (z - peak) / Σe, where neither term is negative.
    """
    own, below, ties, weighted = statistics  # [C] each
    peak = _all_reduce(own.clone(), group, dist.ReduceOp.MAX)  # [C]
    drop = own - peak  # [C], at most 0
    scale = drop.exp()  # [C]
    at_peak = drop == 0  # [C]
    sums = torch.stack(
        [
            scale * torch.where(at_peak, below, below + ties),
            torch.where(at_peak, ties, 0),
            scale * (weighted + (below + ties) * drop),
            torch.where(mine, chosen - peak, 0),
        ]
    )  # [4, C]
    below, ties, weighted, chosen = _all_reduce(sums, group)  # [C] each
    rest = below + (ties - 1)  # [C], Σe - 1
    log_total = rest.log1p()  # [C]
    entropy = log_total - weighted / (1 + rest)  # [C]
    return torch.stack([chosen - log_total, entropy], -1), torch.stack([peak, log_total], -1)  # [C, 2] each


def _local_labels(labels: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Which labels [C] lie in vocabulary rows [first, first + rows), and their local row (0 for the others)."""
    row = labels - first
    mine = (row >= 0) & (row < rows)
    return mine, torch.where(mine, row, 0)


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    group: dist.ProcessGroup | None = None,
    first_row: int = 0,
    compile: bool = False,
) -> tuple[Tensor, Tensor]:
    """log p(label) and the entropy of p = softmax(hidden weight^T / temperature), both [T], differentiable.

    Args:
        hidden: [T, D]; weight: [Vs, D], the vocabulary rows [first_row, first_row + Vs); labels: [T] global token ids.
        chunk_tokens: tokens whose logits exist at once.
        group: the tensor-parallel ranks that hold the other rows; None when weight is the whole vocabulary.
        compile: one compiled pass over each chunk's logits; the same values to rounding.
    """
    constants = _Constants(temperature, chunk_tokens, group, first_row, compile)
    out = _ChunkedLogprobs.apply(hidden, weight, labels, constants)  # [T, 2]
    return out[:, 0], out[:, 1]


class LogprobHead(Linear):
    """An `lm_head` that, inside `scoring(...)`, returns [B, L, 2] (log-probability, entropy) instead of [B, L, V] logits.

    Being the model's own output module, it is called once a forward, inside FSDP2's and tensor parallelism's hooks, with
    its weight gathered: nothing about sharding needs to be known outside.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        chunk_tokens: int = 1024
        """Tokens whose logits exist at once; memory is chunk_tokens x vocabulary x 4 bytes, twice."""

        compile: bool = False
        """torch.compile what is done with each chunk's logits."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.chunk_tokens = config.chunk_tokens
        self.compile_chunks = config.compile
        self._target: tuple[Tensor, float] | None = None

    @contextmanager
    def scoring(self, labels: Tensor, temperature: float) -> Iterator[None]:
        """Within this context `forward` scores `labels` [B*L] at the sampling temperature."""
        self._target = labels, temperature
        try:
            yield
        finally:
            self._target = None

    def forward(self, input: Tensor) -> Tensor:
        """[B, L, D] -> [B, L, V] logits, or [B, L, 2] inside `scoring`."""
        if self._target is None:
            return super().forward(input)
        labels, temperature = self._target
        hidden, weight, group, first = input, self.weight, None, 0
        if isinstance(weight, DTensor):  # tensor parallel: this rank holds some rows of the vocabulary
            mesh = weight.device_mesh
            group = mesh.get_group()
            first = _first_row(weight)
            weight = weight.to_local(grad_placements=[Shard(0)])  # [Vs, D]
            hidden = hidden.to_local(grad_placements=[Partial()])  # [B, L, D], its gradient summed over ranks
        logprobs, entropy = chunked_logprobs(
            hidden.flatten(0, 1),
            weight.to(hidden.dtype),
            labels,
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            group=group,
            first_row=first,
            compile=self.compile_chunks,
        )
        return torch.stack([logprobs, entropy], -1).unflatten(0, input.shape[:2])  # [B, L, 2]


def _first_row(weight: DTensor) -> int:
    """The global row at which this rank's shard of a Shard(0) weight [V, D] begins (shards are dealt as torch.chunk does)."""
    mesh = weight.device_mesh
    rows = -(-weight.shape[0] // mesh.size())
    return min(mesh.get_local_rank() * rows, weight.shape[0])
