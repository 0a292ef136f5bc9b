"""Advantages against the formulas of docs/papers.md, worked out by hand, and against the numbers of peers."""

import math

import pytest

from tests.parts.algorithm import group
from torchtitan_rl.algorithm import (
    KL,
    Algorithm,
    BatchStd,
    EntropyBonus,
    Gdpo,
    GroupMean,
    Grpo,
    MaxRl,
    Rloo,
    Truncation,
)
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.errors import UserError
from torchtitan_rl.types import flat

ALL = [GroupMean.Config(), Grpo.Config(), BatchStd.Config(), Rloo.Config()]
IDS = ["group_mean", "grpo", "batch_std", "rloo"]


def advantages(config, *rewards, breakdowns=None):
    """The advantages of groups with these rewards; `breakdowns` [group][sample]."""
    columns = [{"breakdown": of_group} for of_group in breakdowns or []] or [{}] * len(rewards)
    groups = draft_episodes([group(i, r, **c) for i, (r, c) in enumerate(zip(rewards, columns, strict=True))])
    for episode in flat(groups):
        episode.credit.shaped_reward = episode.reward
    return config.build().of_step([list(of_group) for of_group in rewards], groups)


@pytest.mark.parametrize("config", ALL, ids=IDS)
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e9 + 0.1, -0.7])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_equal_rewards_give_exactly_zero_even_if_their_mean_is_not_exact(config, value, size):
    assert advantages(config, [value] * size, [0.0, 1.0])[0] == [0.0] * size


@pytest.mark.parametrize(
    ("lowest", "rewards", "expected"),
    [
        (0.0, [1.0, 0.0, 0.0, 0.0], [3.0, -1.0, -1.0, -1.0]),
        (-1.0, [1.0, -1.0, -1.0, -1.0], [3.0, -1.0, -1.0, -1.0]),
        (0.0, [1.0, 1.0, 0.0, None], [0.5, 0.5, -1.0, 0.0]),
        (0.0, [0.3, 0.3], [0.0, 0.0]),
    ],
)
def test_maxrl_divides_by_the_mean_above_the_lowest_reward(lowest, rewards, expected):
    assert advantages(MaxRl.Config(lowest=lowest), rewards)[0] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("rewards", [[1.0, -1.0, None, -1.0], [-1.0, -1.0]])
def test_maxrl_refuses_a_reward_below_its_lowest_also_in_a_group_of_equal_ones(rewards):
    with pytest.raises(UserError, match=r"advantage.lowest = 0.0: expected at most -1, a completion's reward"):
        advantages(MaxRl.Config(), [1.0, 0.0], rewards)
    assert advantages(MaxRl.Config(), [None, None]) == [[0.0, 0.0]]


def test_gdpo_equals_trl_normalize_then_sum():
    scores = [(1.0, 0.0), (0.0, 0.5), (1.0, 1.0), (1.0, 0.25), (0.0, 0.25), (0.0, 0.75)]
    breakdowns = [[{"a": a, "b": b} for a, b in scores[:3]], [{"a": a, "b": b} for a, b in scores[3:]]]
    rewards = [[a + 0.5 * b for a, b in scores[:3]], [a + 0.5 * b for a, b in scores[3:]]]
    found = advantages(Gdpo.Config(weights={"b": 0.5}), *rewards, breakdowns=breakdowns)
    assert sum(found, []) == pytest.approx(
        [0.08648582418, -1.29085442204, 1.20436859786, 0.96819669281, -0.96808494025, -0.00011175256], abs=1e-9
    )


def test_gdpo_gives_groups_of_equal_rewards_exactly_0():
    scores = [[(0.1, 0.7), (0.3, 0.2), (0.9, 0.4)], [(0.1 + 0.2, 0.3)] * 3, [(1.0, 0.0), (0.0, 1.0), (1.0, 0.0)]]
    breakdowns = [[{"a": a, "b": b} for a, b in of_group] for of_group in scores]
    rewards = [[a + b for a, b in of_group] for of_group in scores]
    found = advantages(Gdpo.Config(), *rewards, breakdowns=breakdowns)
    assert found[1] == found[2] == [0.0] * 3
    assert min(map(abs, found[0])) > 0.1


def test_entropy_bonus_adds_the_z_score_of_the_groups_entropies_times_the_steps_reward_deviation():
    algorithm = Algorithm.Config(advantage=EntropyBonus.Config(coef=0.5, std_eps=1e-4)).build(max_completion_tokens=9)
    groups = draft_episodes(
        [
            group(0, [1.0, 0.0, 2.0, None], logprobs=[(-1.0, -3.0), (-4.0,), (-6.0, -6.0), (-9.0,)]),
            group(1, [1.0, 1.0], logprobs=[(-1.0,), (-3.0,)]),
        ]
    )
    algorithm.credit.assign(groups)
    # Entropies per token 2, 4, 6 and 1, 3; their z-scores with N: -a, 0, a with a = 2 / sqrt(8 / 3), and -1, 1.
    deviation = math.sqrt(sum((r - 1) ** 2 for r in (1, 0, 2, 1, 1)) / 5)
    a = 2 / math.sqrt(8 / 3)
    bonuses = [[0.5 * deviation * z for z in of_group] for of_group in ((-a, 0, a), (-1, 1))]
    found = [[e.credit.columns.get("entropy_bonus") for e in one.samples] for one in groups]
    assert found == [pytest.approx([*bonuses[0], None], abs=1e-7), pytest.approx(bonuses[1])]
    totals = [1.0 + bonuses[0][0], 0.0, 2.0 + bonuses[0][2]]
    std = math.sqrt(sum((x - sum(totals) / 3) ** 2 for x in totals) / 2)
    expected = [(x - sum(totals) / 3) / (std + 1e-4) for x in totals]
    assert [e.credit.advantage for e in groups[0].samples] == pytest.approx([*expected, 0.0], abs=1e-6)
    assert [e.credit.advantage for e in groups[1].samples] == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-3)


def test_entropy_bonus_is_not_scaled_by_rewards_that_are_all_equal_and_off_with_coef_0():
    groups = [group(0, [0.1] * 2, logprobs=[(-1.0,), (-3.0,)]), group(1, [None, None]), group(2, [0.1, None])]
    for coef, bonus in ((0.5, 0.5), (0.0, 0.0)):
        algorithm = Algorithm.Config(advantage=EntropyBonus.Config(coef=coef)).build(max_completion_tokens=9)
        drafts = draft_episodes(groups)
        algorithm.credit.assign(drafts)
        assert [e.credit.columns["entropy_bonus"] for e in drafts[0].samples] == pytest.approx([-bonus, bonus])
        assert any(e.credit.advantage for e in drafts[0].samples) == (coef > 0)
        assert [e.credit.advantage for e in flat(drafts[1:])] == [0.0] * 4


IN_REWARD = KL.Config(coef=0.1, placement="reward")
PENALTY = Truncation.Config(mode="penalty", cut_reward=-0.5)


@pytest.mark.parametrize(
    ("advantage", "wrong", "said"),
    [
        (Gdpo.Config(), {"kl": IN_REWARD}, "kl.placement = 'reward': expected \"loss\" with Gdpo"),
        (Gdpo.Config(), {"truncation": Truncation.Config(cut_reward=-1e-3)}, "truncation.cut_reward = -0.001"),
        (MaxRl.Config(lowest=-9.0), {"kl": IN_REWARD}, "kl.placement = 'reward': expected \"loss\" with MaxRl"),
        (MaxRl.Config(), {"truncation": PENALTY}, "advantage.lowest = 0.0: expected at most -1.5"),
    ],
)
def test_settings_without_a_bound_are_refused(advantage, wrong, said):
    with pytest.raises(UserError, match=f"algorithm.{said}"):
        Algorithm.Config(advantage=advantage, **wrong)


def test_kl_in_the_loss_and_a_penalty_above_the_lowest_are_accepted():
    for advantage in (Gdpo.Config(), MaxRl.Config(lowest=-9.0)):
        Algorithm.Config(advantage=advantage, kl=KL.Config(coef=0.1))
    Algorithm.Config(advantage=MaxRl.Config(lowest=-1.5), truncation=PENALTY)
