import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.models.common.nn_modules import RMSNorm

from torchtitan_rl.cpu.rms_norm import CpuRMSNorm, use_cpu_norms


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", [(7, 16), (1, 5, 3, 16)])
def test_it_computes_and_differentiates_what_pytorch_does(dtype, bound, shape):
    torch.manual_seed(0)
    norm = RMSNorm.Config(normalized_shape=16, eps=1e-2).build().to(dtype)
    nn.init.normal_(norm.weight)
    use_cpu_norms(nn.Sequential(norm))
    assert type(norm) is CpuRMSNorm
    x, weights = torch.randn(2, *shape).to(dtype)
    x.requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in (x, norm.weight)]
    found, expected = norm(x), F.rms_norm(exact[0], (16,), exact[1], 1e-2)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound)
    found_grads = torch.autograd.grad((found * weights).sum(), (x, norm.weight))
    expected_grads = torch.autograd.grad((expected * weights).sum(), exact)
    for ours, theirs in zip(found_grads, expected_grads, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=3 * bound, atol=3 * bound)
