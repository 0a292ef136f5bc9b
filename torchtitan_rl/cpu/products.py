"""float32 matrix products with oneDNN instead of MKL, which is PyTorch's default."""

import platform
import warnings
from functools import cache

import torch

SMALLEST = 16
"""Smallest dimension of a product. For smaller ones, oneDNN's overhead is larger than its gain."""


@cache
def override_products() -> torch.library.Library | None:
    """Replace `aten::mm` on the CPU. It covers the policy's layers, their backward, the head and DTensor's local products.

    Returns the library object that keeps the replacement registered, or None if oneDNN is not available.
    """
    if platform.machine() != "x86_64" or not torch.backends.mkldnn.is_available():
        return None
    products = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a kernel is overridden
        products.impl("mm", _product, "CPU", allow_override=True)
    return products


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns a [M, K] @ b [K, N]: float32 with oneDNN in full precision, other types with PyTorch's own kernel.

    MKL uses only AVX2 kernels on non-Intel processors: 90 GFLOP/s per core of an AMD Zen 5. oneDNN's AVX-512 reaches 200.
    """
    fits = a.dtype == b.dtype == torch.float32 and a.shape[1] == b.shape[0] and min(*a.shape, b.shape[1]) >= SMALLEST
    if fits and _has_rows(a) and _has_rows(b):
        return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[1]))


def _has_rows(t: torch.Tensor) -> bool:
    """Whether t [R, C] or its transpose has contiguous, non-overlapping rows, as oneDNN requires."""
    (rows, columns), (down, right) = t.shape, t.stride()
    return (right == 1 and down >= columns) or (down == 1 and right >= rows)
