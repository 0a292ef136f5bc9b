"""Muon in float32. torch.optim.Muon orthogonalizes in bfloat16, which takes 100 times as long on CPUs without its instructions."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_MOMENTUM = 0.9


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized by Newton-Schulz iterations (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon).

    The update of a matrix [m, n] is scaled by max(1, m / n) ** 0.5, as torch.optim.Muon does by default.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        """Updates every matrix. Matrices of one shape are orthogonalized at once."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for matrix in group["params"]:
                by_shape.setdefault(matrix.shape, []).append(matrix)
            for (rows, columns), matrices in by_shape.items():
                moved = orthogonalized(
                    torch.stack([self._momentum(matrix) for matrix in matrices])
                )  # [N, rows, columns]
                rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                for matrix, update in zip(matrices, moved, strict=True):
                    matrix.sub_(update, alpha=rate)

    def _momentum(self, matrix: nn.Parameter) -> Tensor:
        """Adds the gradient to the matrix's mean gradient. Returns Nesterov's mean, [rows, columns]."""
        state = self.state[matrix]
        if not state:
            state["mean"] = torch.zeros_like(matrix)
        mean = state["mean"].lerp_(matrix.grad, 1 - _MOMENTUM)
        return matrix.grad.lerp(mean, _MOMENTUM)


def orthogonalized(matrices: Tensor) -> Tensor:
    """Returns the nearest semi-orthogonal matrices, roughly, by three Newton-Schulz iterations.

    Three learn as well as the usual five. Their cost does not shrink with the batch.

    Args:
        matrices: float32 [N, rows, columns].
    """
    a, b, c = _COEFFICIENTS
    if matrices.shape[1] > matrices.shape[2]:
        return orthogonalized(matrices.mT).mT
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # [N, rows, columns]
    for _ in range(3):
        gram = x @ x.mT  # [N, rows, rows]
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # [N, rows, rows]
        x = torch.baddbmm(x, polynomial, x, beta=a)  # [N, rows, columns]
    return x
