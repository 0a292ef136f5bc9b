"""KL estimators and where the term goes."""

import math

import pytest
import torch

from tests.parts.algorithm import MAX_TOKENS, episodes_of, group
from torchtitan_rl.algorithm import KL, Algorithm, kl_estimate


def test_k3_is_accurate_at_small_ratios_in_float32():
    # k3(d) = d^2 / 2 - d^3 / 6 + ...: exp(-d) - 1 in float32 would be wrong in its first digit here
    assert kl_estimate(torch.tensor(1e-3), "k3").item() == pytest.approx(5e-7 - 1e-9 / 6, rel=1e-3)
    assert kl_estimate(torch.tensor(0.0), "k3").item() == 0.0


@pytest.mark.parametrize(
    ("log_ratio", "expected"),
    [(-59.0, 1 - math.exp(59)), (-61.0, 1 - math.exp(60)), (-1e9, 1 - math.exp(60)), (61.0, 1.0)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_gradient_points_to_the_reference_at_any_distance(log_ratio, expected, dtype):
    start = torch.tensor(log_ratio, dtype=dtype, requires_grad=True)
    value = kl_estimate(start, "k3")
    value.backward()
    assert torch.isfinite(value)
    assert start.grad.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_missing_reference_is_an_error_with_a_remedy(placement):
    config = Algorithm.Config(kl=KL.Config(coef=0.5, placement=placement))
    with pytest.raises(ValueError, match="prompt 0, sample 0: reference_logprobs = None"):
        episodes_of(config.build(max_completion_tokens=MAX_TOKENS), group(0, [1.0, 0.0]))
