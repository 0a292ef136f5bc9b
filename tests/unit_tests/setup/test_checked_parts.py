"""Parts of the objective that return a wrong shape, number or gradient are named; nothing trains on them."""

import pytest
import torch

from tests.parts.algorithm import MAX_TOKENS, episodes_of, group, normalizers_of, pack, policy_like, run_loss
from tests.parts.wrong_parts import CASES, DetachedLoss, objective
from torchtitan_rl.core.algorithm import Advantage, Algorithm
from torchtitan_rl.core.errors import UserError
from torchtitan_rl.setup.checked_parts import checked


def train(algorithm):
    episodes = episodes_of(algorithm, group(0, [1.0, 2.0]))
    batch = pack(episodes, normalizers_of(algorithm, episodes), padding=1)
    return run_loss(algorithm, episodes, policy_like(episodes), batch)


@pytest.mark.parametrize(("parts", "message"), CASES, ids=[next(iter(parts.values())).__name__ for parts, _ in CASES])
def test_part_with_a_wrong_return_type_is_named(parts, message):
    algorithm = checked(objective(parts).build(max_completion_tokens=MAX_TOKENS))
    with pytest.raises(UserError, match=message):
        train(algorithm)


class ArrayAdvantage(Advantage):
    def of_group(self, group):
        return torch.tensor(group.rewards, dtype=torch.float64) - 1


def test_advantages_may_be_returned_as_a_tensor():
    algorithm = Algorithm.Config(advantage=ArrayAdvantage.Config()).build(max_completion_tokens=MAX_TOKENS)
    episodes = episodes_of(algorithm, group(0, [1.0, None, 4.0]))
    assert [episode.credit.advantage for episode in episodes] == [0.0, 0.0, 3.0]
    assert all(type(episode.credit.advantage) is float for episode in episodes)


def test_loss_without_gradient_is_accepted_under_no_grad():
    algorithm = checked(Algorithm.Config(loss=DetachedLoss.Config()).build(max_completion_tokens=MAX_TOKENS))
    with torch.no_grad():
        train(algorithm)
