import math

import pytest
import torch
import torch.distributed as dist

from torchtitan_rl import comm
from torchtitan_rl.trainer import finite
from torchtitan_rl.trainer.finite import FiniteUpdates, NonFiniteLossError, fault_in

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def parts(monkeypatch):
    """A model and its optimizer after a step, on one rank."""
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 1)
    monkeypatch.setattr(dist, "get_rank", lambda *_: 0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, [optimizer]


def test_finite_values_pass_the_check(parts):
    assert fault_in(*parts) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_cause_is_reported_before_its_effects(parts, value):
    model, (optimizer,) = parts
    model[1].weight.grad[0, 0] = value
    assert str(fault_in(*parts)) == "the gradients of 1.weight"
    optimizer.state[model[0].bias]["exp_avg"][0] = value
    assert str(fault_in(*parts)) == "the optimizer's moments of 0.bias"
    with torch.no_grad():
        model[0].weight[0, 0] = model[1].bias[0] = value
    assert str(fault_in(*parts)) == "the weights of 0.weight (and 1 more)"


def test_non_finite_updates_are_skipped_up_to_a_limit_reset_by_a_good_one(parts):
    updates = FiniteUpdates(*parts, skip=1)
    assert updates.check_update(0.5, 1.0)
    assert not updates.check_update(math.nan, 1.0)
    assert updates.check_update(0.5, 1.0)
    assert not updates.check_update(0.5, math.inf)
    with pytest.raises(NonFiniteLossError, match="number 2 in a row and trainer.skip_nonfinite_updates allows 1"):
        updates.check_update(0.5, math.inf)


def test_skipped_update_counts_once_over_all_ranks(parts, monkeypatch):
    recorded = []
    monkeypatch.setattr(finite, "record_metric", lambda key, value, reduction: recorded.append((value, reduction)))
    for is_rank_0 in (True, False):
        monkeypatch.setattr(comm, "is_rank_0", lambda is_rank_0=is_rank_0: is_rank_0)
        updates = FiniteUpdates(*parts, skip=9)
        for _ in range(3):
            updates.check_update(math.nan, 1.0)
    assert {reduction for _, reduction in recorded} == {"sum"}
    assert sum(value for value, _ in recorded) == 3


def test_non_finite_weights_always_stop_training(parts):
    model, _ = parts
    FiniteUpdates(*parts, skip=9).check_weights()
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    with pytest.raises(NonFiniteLossError, match="the update left the weights of 0.weight not finite"):
        FiniteUpdates(*parts, skip=9).check_weights()
    with pytest.raises(NonFiniteLossError, match="the weights of 0.weight not finite; the update was not applied. Go"):
        FiniteUpdates(*parts, skip=9).check_update(math.nan, math.nan)
    with pytest.raises(NonFiniteLossError, match="the weights of 0.weight not finite, as loaded"):
        FiniteUpdates(*parts, skip=9).check_loaded()
