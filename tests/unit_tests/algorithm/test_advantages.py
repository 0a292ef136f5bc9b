"""Advantages against the formulas of docs/papers.md, worked out by hand."""

import pytest

from tests.parts.algorithm import group
from torchtitan_rl.algorithm import Grpo
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.algorithm.losses.objectives import BatchStd, GroupMean, Rloo

ALL = [GroupMean.Config(), Grpo.Config(), BatchStd.Config(), Rloo.Config()]
IDS = ["group_mean", "grpo", "batch_std", "rloo"]


def advantages(config, *rewards):
    """The advantages of groups with these rewards."""
    groups = draft_episodes([group(index, of_group) for index, of_group in enumerate(rewards)])
    return config.build().of_step(list(rewards), groups)


@pytest.mark.parametrize(
    ("config", "rewards", "expected"),
    [
        (GroupMean.Config(), [1.0, 0.0, 0.0, 0.0], [0.75, -0.25, -0.25, -0.25]),
        (GroupMean.Config(), [1.0, 3.0], [-1.0, 1.0]),
        # 4/3 of the above: 1 - mean(0,0,0) = 1; 0 - mean(1,0,0) = -1/3
        (Rloo.Config(), [1.0, 0.0, 0.0, 0.0], [1.0, -1 / 3, -1 / 3, -1 / 3]),
        (Rloo.Config(), [1.0, 3.0], [-2.0, 2.0]),
        # variance with N - 1: (0.5625 + 3 * 0.0625) / 3 = 0.25, s = 0.5
        (Grpo.Config(), [1.0, 0.0, 0.0, 0.0], [0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001]),
        (Grpo.Config(std_eps=0.5), [1.0, 0.0, 0.0, 0.0], [0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_advantages_equal_their_closed_form(config, rewards, expected):
    assert advantages(config, rewards)[0] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("config", ALL, ids=IDS)
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e9 + 0.1, -0.7])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_equal_rewards_give_exactly_zero_even_if_their_mean_is_not_exact(config, value, size):
    assert advantages(config, [value] * size, [0.0, 1.0])[0] == [0.0] * size
