"""Muon in float32 against torch's own, which orthogonalizes in bfloat16."""

import pytest
import torch
from torch import nn

from torchtitan_rl.configs.toys.muon import Muon, orthogonalized


def gradients():
    torch.manual_seed(0)
    shapes = [(8, 16), (16, 8), (8, 16), (12, 12)]
    return [torch.randn(shape) for shape in shapes], [[torch.randn(shape) for shape in shapes] for _ in range(3)]


def test_muon_equals_torch_up_to_bfloat16_rounding():
    start, steps = gradients()
    ours, torchs = ([nn.Parameter(matrix.clone()) for matrix in start] for _ in range(2))
    optimizers = [Muon(ours, lr=0.02), torch.optim.Muon(torchs, lr=0.02, momentum=0.9, ns_steps=3, weight_decay=0.0)]
    for step in steps:
        for matrices, optimizer in zip((ours, torchs), optimizers, strict=True):
            for matrix, gradient in zip(matrices, step, strict=True):
                matrix.grad = gradient.clone()
            optimizer.step()
    for mine, theirs, before in zip(ours, torchs, start, strict=True):
        moved = (theirs - before).norm()
        assert (mine - theirs).norm() / moved < 0.02
        assert moved > 0.05


@pytest.mark.parametrize("shape", [(1, 4, 9), (3, 9, 4), (2, 5, 5)])
def test_orthogonalized_matrix_has_singular_values_near_one(shape):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalized(torch.randn(shape)))
    assert values.max() < 1.3
    assert values.mean() > 0.7
