"""float32 matrix products by oneDNN, which PyTorch gives to MKL."""

import platform
import warnings
from functools import cache

import torch

SMALLEST = 16
"""Rows or columns below which oneDNN's set-up costs more than it saves."""


@cache
def override_products() -> torch.library.Library | None:
    """Replace `aten::mm` on this CPU: for the policy's layers, their backward, the head and DTensor's local products.

    Returns what keeps the replacement in place, or None where oneDNN does not have it.
    """
    if platform.machine() != "x86_64" or not torch.backends.mkldnn.is_available():
        return None
    products = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is overridden
        products.impl("mm", _product, "CPU", allow_override=True)
    return products


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] @ b [K, N]: float32 by oneDNN, in full precision, anything else as PyTorch does it.

    MKL gives other makers' processors its AVX2 kernels: 90 GFLOP/s a core of an AMD Zen 5, where oneDNN's AVX-512 reaches 200.
    """
    fits = a.dtype == b.dtype == torch.float32 and a.shape[1] == b.shape[0] and min(*a.shape, b.shape[1]) >= SMALLEST
    if fits and _has_rows(a) and _has_rows(b):
        return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[1]))


def _has_rows(t: torch.Tensor) -> bool:
    """Whether t [R, C], or its transpose, has rows of adjacent elements that do not overlap: oneDNN takes nothing else."""
    (rows, columns), (down, right) = t.shape, t.stride()
    return (right == 1 and down >= columns) or (down == 1 and right >= rows)
