"""CPU kernels for the operators that only a GPU has, so that a GPU's branches run with real numbers on a CPU.

Importing this module registers them: torch's variable-length attention with its gradient, and `torch.mm` with a wider result.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention import varlen


def _each(cu_q: Tensor, cu_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yields the places of each sequence's queries and keys."""
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        yield slice(a, b), slice(c, d)


def _scores(
    query: Tensor, key: Tensor, *, is_causal: bool, scale: float | None, window_size: list[int] | None
) -> Tensor:
    """query [Lq, N, H], key [Lk, Nkv, H] -> scaled scores [Nkv, N/Nkv, Lq, Lk], -inf where a query does not attend.

    As FlashAttention: query i stands at key i + Lk - Lq, and attends to `window_size` keys before it and after it; -1: all.
    """
    n, kv, width = query.shape[1], key.shape[1], query.shape[2]
    q = _wide(query).transpose(0, 1).unflatten(0, (kv, n // kv))  # [Nkv, N/Nkv, Lq, H]
    k = _wide(key).transpose(0, 1)[:, None]  # [Nkv, 1, Lk, H]
    z = q @ k.mT * (width**-0.5 if scale is None else scale)  # [Nkv, N/Nkv, Lq, Lk]
    before, after = window_size or [-1, -1]
    after = 0 if is_causal else after
    seen, place = torch.ones(z.shape[-2:], dtype=torch.bool), z.shape[-1] - z.shape[-2]  # [Lq, Lk]
    if after >= 0:
        seen = seen.tril(place + after)
    if before >= 0:
        seen = seen.triu(place - before)
    return z.masked_fill(~seen, float("-inf"))


def _wide(t: Tensor) -> Tensor:
    """At least float32, in which a GPU's kernel adds."""
    return t.float() if t.dtype == torch.bfloat16 else t


@varlen._varlen_attn.register_kernel("cpu")
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """query [T, N, H], key and value [Tk, Nkv, H] -> out [T, N, H], log-sum-exp [N, T], a random state.

    It asserts what a GPU's kernel needs.
    """
    assert query.dtype == key.dtype == value.dtype, query.dtype
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32, cu_seq_q.dtype
    assert int(cu_seq_q[-1]) == len(query), "the sequences are not the pack"
    assert int(cu_seq_q.diff().max()) <= max_q, "a sequence is longer than max_q"
    assert enable_gqa or query.shape[1] == key.shape[1]
    out = torch.empty_like(query)
    lse = _wide(query).new_zeros(query.shape[1], len(query))  # [N, T]
    for rows, keys in _each(cu_seq_q, cu_seq_k):
        z = _scores(query[rows], key[keys], is_causal=is_causal, scale=scale, window_size=window_size)
        v = _wide(value[keys]).transpose(0, 1)[:, None]  # [Nkv, 1, Lk, H]
        out[rows] = (z.softmax(-1) @ v).flatten(0, 1).transpose(0, 1).to(out.dtype)
        lse[:, rows] = z.logsumexp(-1).flatten(0, 1)
    return out, lse, torch.zeros(2, dtype=torch.uint64)


@varlen._varlen_attn_backward.register_kernel("cpu")
def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients to query, key and value. As a GPU's kernel, it reads `out` and `lse` and not its own."""
    grads = [torch.empty_like(t) for t in (query, key, value)]
    n, kv, width = query.shape[1], key.shape[1], query.shape[2]
    factor = width**-0.5 if scale is None else scale
    for rows, keys in _each(cu_seq_q, cu_seq_k):
        z = _scores(query[rows], key[keys], is_causal=is_causal, scale=scale, window_size=window_size)
        p = (z - lse[:, rows].unflatten(0, (kv, n // kv))[..., None]).exp()  # [Nkv, N/Nkv, Lq, Lk]
        q, g, o = (_wide(t[rows]).transpose(0, 1).unflatten(0, (kv, n // kv)) for t in (query, grad_out, out))
        k, v = (_wide(t[keys]).transpose(0, 1)[:, None] for t in (key, value))  # [Nkv, 1, Lk, H]
        dp = g @ v.mT  # [Nkv, N/Nkv, Lq, Lk]
        ds = p * (dp - (g * o).sum(-1, keepdim=True)) * factor  # [Nkv, N/Nkv, Lq, Lk]
        grads[0][rows] = (ds @ k).flatten(0, 1).transpose(0, 1).to(query.dtype)
        grads[1][keys] = (ds.mT @ q).sum(1).transpose(0, 1).to(key.dtype)
        grads[2][keys] = (p.mT @ g).sum(1).transpose(0, 1).to(value.dtype)
    return tuple(grads)


_library = torch.library.Library("aten", "IMPL")
_library.impl("mm.dtype", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype), "CPU")
