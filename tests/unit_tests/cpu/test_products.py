"""Products by oneDNN: float32's digits, PyTorch's errors, and operands of every layout."""

import pytest
import torch

from torchtitan_rl.core.device import ON_CPU
from torchtitan_rl.cpu.products import override_products

pytestmark = pytest.mark.skipif(not ON_CPU, reason="for products on a CPU")


@pytest.fixture(autouse=True)
def products():
    override_products()


@pytest.mark.parametrize("size", [(3, 5, 7), (64, 48, 32)])
def test_products_on_a_cpu_keep_float32s_digits_and_pytorchs_errors(size):
    m, k, n = size
    a, b = torch.randn(m, k), torch.randn(n, k)
    exact = a.double() @ b.double().T
    assert (a @ b.T - exact).norm() < 1e-6 * exact.norm()
    assert ((b @ a.T).T - exact).norm() < 1e-6 * exact.norm()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        a @ torch.randn(k + 16, n)
    with pytest.raises(RuntimeError, match="same dtype"):
        a @ b.double().T


def operands() -> dict[str, torch.Tensor]:
    """Matrices [37, 20] of unusual layouts, by name."""
    wide = torch.randn(37, 60)
    return {
        "rows that overlap": torch.arange(200.0).unfold(0, 20, 5),
        "its transpose": torch.randn(200).unfold(0, 37, 5)[:20].T,
        "one row for all": torch.randn(1, 20).expand(37, 20),
        "one column for all": torch.randn(37, 1).expand(37, 20),
        "columns with gaps": wide[:, ::3],
        "rows with gaps": wide[:, 20:40],
        "every second row": torch.randn(74, 20)[::2],
    }


@pytest.mark.parametrize("layout", list(operands()))
def test_operands_of_any_layout_are_multiplied(layout):
    a = operands()[layout]
    left, right = torch.randn(24, 37), torch.randn(20, 24)
    for x, y in ((a, right), (left, a), (a.T, left.T), (right.T, a.T)):
        torch.testing.assert_close(x @ y, (x.double() @ y.double()).float(), rtol=1e-4, atol=1e-3)
