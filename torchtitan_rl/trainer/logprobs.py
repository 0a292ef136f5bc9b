"""Log-probabilities and entropies straight from hidden states: [T, V] logits never exist for T tokens at once.

Notation: T tokens, D hidden size, V vocabulary, Vs the vocabulary rows on this tensor-parallel rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard
from torchtitan.models.common.linear import Linear


def _all_reduce(t: Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    if group is not None:
        dist.all_reduce(t, op=op, group=group)
    return t


def _upcast(t: Tensor) -> Tensor:
    """float32, or float64 where the model is in float64 (the tests' exact comparison)."""
    return t if t.dtype == torch.float64 else t.float()


class _ChunkedLogprobs(torch.autograd.Function):
    """log p(label) and entropy of softmax(h W^T / temperature), chunk by chunk, forward and backward.

    With z the scaled logits of a token, p = softmax(z) and H its entropy:
      d log p(y) / dz = onehot(y) - p        dH / dz = -p * (log p + H)
    The backward recomputes each chunk's logits from the saved log-sum-exp, so memory is one chunk of [C, Vs].
    With a sharded vocabulary each rank holds rows [first, first + Vs) of W; the returned values are the same on every
    rank, and the gradient to `hidden` is this rank's part of a sum over ranks.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, temperature, chunk, group, first):  # noqa: ANN001
        """hidden [T, D], weight [Vs, D], labels [T] -> [T, 2]: log-probability and entropy."""
        T = hidden.shape[0]
        out_dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        out = hidden.new_empty(T, 2, dtype=out_dtype)  # [T, 2]
        lse = hidden.new_empty(T, dtype=out_dtype)  # [T]
        for begin in range(0, T, chunk):
            part = slice(begin, begin + chunk)
            z = _upcast(hidden[part] @ weight.T) / temperature  # [C, Vs]
            peak = _all_reduce(z.max(-1).values, group, dist.ReduceOp.MAX)  # [C]
            mine, row = _local_labels(labels[part], first, weight.shape[0])  # [C], [C]
            exp = (z - peak[:, None]).exp()  # [C, Vs]
            chosen = torch.where(mine, z.gather(-1, row[:, None])[:, 0], 0)  # [C]
            sums = torch.stack([exp.sum(-1), (exp * z).sum(-1), chosen])  # [3, C]
            total, weighted, chosen = _all_reduce(sums, group)  # [C] each
            lse[part] = peak + total.log()
            out[part, 0] = chosen - lse[part]
            out[part, 1] = lse[part] - weighted / total
        ctx.save_for_backward(hidden, weight, labels, lse, out)
        ctx.constants = temperature, chunk, first
        return out

    @staticmethod
    def backward(ctx, grad):  # noqa: ANN001
        """grad [T, 2] -> this rank's gradient to hidden [T, D] and weight [Vs, D]."""
        hidden, weight, labels, lse, out = ctx.saved_tensors
        temperature, chunk, first = ctx.constants
        grad_hidden = torch.empty_like(hidden)  # [T, D]
        grad_weight = torch.zeros_like(weight, dtype=out.dtype)  # [Vs, D], summed over chunks in full precision
        for begin in range(0, hidden.shape[0], chunk):
            part = slice(begin, begin + chunk)
            # In place, so that two [C, Vs] exist at once.
            logp = _upcast(hidden[part] @ weight.T).div_(temperature).sub_(lse[part, None])  # [C, Vs]
            p = logp.exp()  # [C, Vs]
            g_logprob, g_entropy = grad[part, 0, None], grad[part, 1, None]  # [C, 1] each
            dz = logp.add_(out[part, 1, None]).mul_(g_entropy).add_(g_logprob).mul_(p).neg_()  # [C, Vs]
            mine, row = _local_labels(labels[part], first, weight.shape[0])  # [C], [C]
            dz.scatter_add_(-1, row[:, None], torch.where(mine[:, None], g_logprob, 0))
            dz = (dz / temperature).to(hidden.dtype)  # [C, Vs]
            grad_hidden[part] = dz @ weight  # [C, D]
            grad_weight += dz.T @ hidden[part]  # [Vs, D]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


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
) -> tuple[Tensor, Tensor]:
    """log p(label) and the entropy of p = softmax(hidden weight^T / temperature), both [T], differentiable.

    Args:
        hidden: [T, D]; weight: [Vs, D], the vocabulary rows [first_row, first_row + Vs); labels: [T] global token ids.
        chunk_tokens: tokens whose logits exist at once.
        group: the tensor-parallel ranks that hold the other rows; None when weight is the whole vocabulary.
    """
    out = _ChunkedLogprobs.apply(hidden, weight, labels, temperature, chunk_tokens, group, first_row)  # [T, 2]
    return out[:, 0], out[:, 1]


class LogprobHead(Linear):
    """An `lm_head` that, inside `scoring(...)`, returns [B, L, 2] (log-probability, entropy) instead of [B, L, V] logits.

    Being the model's own output module, it is called once a forward, inside FSDP2's and tensor parallelism's hooks, with
    its weight gathered: nothing about sharding needs to be known outside.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        chunk_tokens: int = 1024
        """Tokens whose logits exist at once; memory is chunk_tokens x vocabulary x 4 bytes."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.chunk_tokens = config.chunk_tokens
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
        )
        return torch.stack([logprobs, entropy], -1).unflatten(0, input.shape[:2])  # [B, L, 2]


def _first_row(weight: DTensor) -> int:
    """The global row at which this rank's shard of a Shard(0) weight [V, D] begins (shards are dealt as torch.chunk does)."""
    mesh = weight.device_mesh
    rows = -(-weight.shape[0] // mesh.size())
    return min(mesh.get_local_rank() * rows, weight.shape[0])
