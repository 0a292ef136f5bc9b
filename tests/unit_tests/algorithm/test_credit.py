"""From rewards to advantages: truncation, zero variance, SEED-GRPO, None."""

import math

import pytest
import torch

from tests.parts.algorithm import built, episodes_of, group
from torchtitan_rl.algorithm import Advantage, GroupFilter, Truncation
from torchtitan_rl.algorithm.losses.seed_grpo import semantic_entropy


class ArrayAdvantage(Advantage):
    def of_group(self, group):
        return torch.tensor(group.rewards, dtype=torch.float64) - 1


def test_advantages_may_be_returned_as_a_tensor():
    algorithm = built(advantage=ArrayAdvantage.Config())
    episodes = episodes_of(algorithm, group(0, [1.0, None, 4.0]))
    assert [episode.credit.advantage for episode in episodes] == [0.0, 0.0, 3.0]
    assert all(type(episode.credit.advantage) is float for episode in episodes)


class Easy(GroupFilter):
    def left_out(self, group):
        return all(sample.reward > 2 for sample in group.samples)


def test_a_filter_may_answer_false_for_a_group_that_is_kept():
    algorithm = built(group_filter=Easy.Config())
    assert [episode.in_loss for episode in episodes_of(algorithm, group(0, [1.0, 4.0]))] == [True, True]


def test_penalty_interval_is_at_most_the_length_limit_of_a_mixture_member():
    truncation = Truncation.Config(mode="penalty", cache_tokens=10).build()
    assert [truncation.penalty(length, 8) for length in (0, 4, 8)] == [0.0, -0.5, -1.0]


@pytest.mark.parametrize("scale", [1.0, 2.0**-20, 2.0**20])
def test_rewards_equal_up_to_summation_order_give_no_advantage(scale):
    algorithm = built(zero_variance="drop")
    sums = [scale * ((0.1 + 0.2) + 0.3), scale * ((0.3 + 0.2) + 0.1)]
    assert sums[0] != sums[1]
    cancelled = [(0.1 + 0.2) - 0.3, 0.0]
    for pair in (sums, [-sums[0], -sums[1]], cancelled):
        episodes = episodes_of(algorithm, group(0, pair))
        assert [episode.credit.left_out for episode in episodes] == ["zero variance"] * 2
        assert [episode.credit.advantage for episode in episodes] == [0.0, 0.0]
    close = episodes_of(algorithm, group(0, [scale, scale * (1 + 1e-7)]))
    assert [episode.in_loss for episode in close] == [True, True]


@pytest.mark.parametrize(
    ("answers", "means", "expected"),
    [
        (["4", "4", "4"], [-1.0, -2.0, -3.0], 0.0),
        (["4", "5", "6", "7"], [-1.0] * 4, math.log(4)),
        (["4", "4", "5", "5"], [-1.0] * 4, math.log(2)),
        # unparsable answers are clusters of their own
        ([None, None], [-1.0, -1.0], math.log(2)),
        # masses 3 : 1
        (["4", "5"], [math.log(3), 0.0], -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))),
        # far below the smallest float the shares are still 1/2
        (["4", "5"], [-1e6, -1e6], math.log(2)),
    ],
)
def test_semantic_entropy_in_closed_form(answers, means, expected):
    assert semantic_entropy(answers, means) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("end", ["length", "max_tokens", "max_turns", "time", "env_error"])
def test_the_finish_reasons_that_count_as_cut_may_be_chosen(end):
    pair = group(0, [1.0, 0.0], finish_reason=[end, "stop"])
    masked = built(truncation=Truncation.Config(mode="mask"))
    reason = None if end == "env_error" else "truncated"
    assert [e.credit.left_out for e in episodes_of(masked, pair)] == [reason, None]
    only = built(truncation=Truncation.Config(mode="mask", cut=("length",)))
    assert [e.in_loss for e in episodes_of(only, pair)] == [end != "length", True]
