import math

import pytest
import torch
import torch.distributed as dist

from torchtitan_rl.trainer.finite import fault_in


@pytest.fixture
def parts(monkeypatch):
    """A model and its optimizer after a step, on one rank."""
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 1)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, [optimizer]


def test_finite_numbers_are_no_fault(parts):
    assert fault_in(*parts) is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_cause_is_named_before_its_effects(parts, value):
    model, (optimizer,) = parts
    model[1].weight.grad[0, 0] = value
    assert fault_in(*parts) == "the gradients of 1.weight"
    optimizer.state[model[0].bias]["exp_avg"][0] = value
    assert fault_in(*parts) == "the optimizer's moments of 0.bias"
    with torch.no_grad():
        model[0].weight[0, 0] = model[1].bias[0] = value
    assert fault_in(*parts) == "the weights of 0.weight (and 1 more)"
