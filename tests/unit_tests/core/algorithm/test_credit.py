"""From rewards to advantages: truncation, zero variance, SEED-GRPO, None."""

import math
from dataclasses import replace

import pytest

from tests.parts.algorithm import (
    MAX_TOKENS,
    episodes_of,
    group,
    group_of,
    normalizers_of,
    scored,
)
from torchtitan_rl.core.algorithm import Algorithm, Truncation
from torchtitan_rl.core.generator import SamplingConfig
from torchtitan_rl.core.types import Group
from torchtitan_rl.library.objectives import GroupMean
from torchtitan_rl.library.seed_grpo import SeedGrpo, semantic_entropy


def tokens(length: int) -> tuple[float, ...]:
    return (-1.0,) * length


def test_masked_truncated_completions_are_out_of_the_loss_and_in_the_baseline():
    algorithm = Algorithm.Config(advantage=GroupMean.Config(), truncation=Truncation.Config(mode="mask")).build(
        max_completion_tokens=MAX_TOKENS
    )
    episodes = episodes_of(algorithm, group(0, [1.0, 0.0, 0.5], finish_reason=["stop", "length", "stop"]))
    assert [episode.credit.left_out for episode in episodes] == [None, "truncated", None]
    assert [episode.credit.advantage for episode in episodes] == [0.5, -0.5, 0.0]
    assert normalizers_of(algorithm, episodes).num_sequences == 2


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (10, 0.0), (12, 0.0), (13, -0.25), (14, -0.5), (16, -1.0), (20, -1.0)]
)
def test_soft_overlong_penalty_is_linear_within_its_interval(length, expected):
    truncation = Truncation.Config(mode="penalty", cache_tokens=4).build()
    assert truncation.penalty(length, 16) == expected


def test_penalty_interval_is_at_most_the_length_limit_of_a_mixture_member():
    truncation = Truncation.Config(mode="penalty", cache_tokens=10).build()
    assert [truncation.penalty(length, 8) for length in (0, 4, 8)] == [0.0, -0.5, -1.0]


def test_default_penalty_interval_is_a_fifth_of_the_longest_completion():
    truncation = Truncation.Config(mode="penalty").build()
    assert truncation.penalty(16384, 20480) == 0.0  # DAPO's numbers
    assert truncation.penalty(16384 + 2048, 20480) == -0.5


def test_length_penalty_changes_the_advantage_and_not_the_logged_reward():
    algorithm = Algorithm.Config(
        advantage=GroupMean.Config(), truncation=Truncation.Config(mode="penalty", cache_tokens=8)
    ).build(max_completion_tokens=MAX_TOKENS)
    episodes = episodes_of(algorithm, group(0, [1.0, 1.0], logprobs=[tokens(2), tokens(12)]))
    assert [episode.reward for episode in episodes] == [1.0, 1.0]
    assert [episode.credit.shaped_reward for episode in episodes] == [1.0, 0.5]
    assert [episode.credit.advantage for episode in episodes] == [0.25, -0.25]


@pytest.mark.parametrize(("choice", "in_loss"), [("keep", True), ("drop", False), ("refill", False)])
def test_zero_variance_groups_are_kept_or_dropped(choice, in_loss):
    algorithm = Algorithm.Config(zero_variance=choice).build(max_completion_tokens=MAX_TOKENS)
    episodes = episodes_of(algorithm, group(0, [0.1] * 3), group(1, [1.0, 0.0]))
    assert [episode.in_loss for episode in episodes] == [in_loss] * 3 + [True] * 2
    assert [episode.credit.advantage for episode in episodes[:3]] == [0.0] * 3
    assert [episode.credit.left_out for episode in episodes[:3]] == [None if in_loss else "zero variance"] * 3


@pytest.mark.parametrize("scale", [1.0, 2.0**-20, 2.0**20])
def test_rewards_equal_up_to_summation_order_give_no_advantage(scale):
    algorithm = Algorithm.Config(zero_variance="drop").build(max_completion_tokens=MAX_TOKENS)
    sums = [scale * ((0.1 + 0.2) + 0.3), scale * ((0.3 + 0.2) + 0.1)]
    assert sums[0] != sums[1]
    cancelled = [(0.1 + 0.2) - 0.3, 0.0]
    for pair in (sums, [-sums[0], -sums[1]], cancelled):
        episodes = episodes_of(algorithm, group(0, pair))
        assert [episode.credit.left_out for episode in episodes] == ["zero variance"] * 2
        assert [episode.credit.advantage for episode in episodes] == [0.0, 0.0]
    close = episodes_of(algorithm, group(0, [scale, scale * (1 + 1e-7)]))
    assert [episode.in_loss for episode in close] == [True, True]


def test_zero_variance_group_is_dropped_despite_a_length_penalty():
    algorithm = Algorithm.Config(zero_variance="drop", truncation=Truncation.Config(mode="penalty")).build(
        max_completion_tokens=MAX_TOKENS
    )
    equal = group(0, [1.0, 1.0], logprobs=[tokens(2), tokens(MAX_TOKENS)])
    assert algorithm.credit.group_left_out(equal) == "zero variance"
    assert [episode.in_loss for episode in episodes_of(algorithm, equal)] == [False, False]


def test_completions_without_reward_or_tokens_are_excluded_from_the_loss():
    algorithm = Algorithm.Config(advantage=GroupMean.Config()).build(max_completion_tokens=MAX_TOKENS)
    episodes = episodes_of(algorithm, group_of(0, scored(0, 1.0), scored(1, None), scored(2, 0.0, logprobs=())))
    assert [episode.credit.left_out for episode in episodes] == [None, "no reward", "no tokens"]
    assert [episode.credit.advantage for episode in episodes] == [
        0.5,
        0.0,
        -0.5,
    ]  # the empty one's reward is in the baseline


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


def test_seed_grpo_scales_all_advantages_of_a_group_alike():
    plain = Algorithm.Config(advantage=GroupMean.Config()).build(max_completion_tokens=MAX_TOKENS)
    seed = Algorithm.Config(advantage=GroupMean.Config(), seed_grpo=SeedGrpo.Config(alpha=0.5)).build(
        max_completion_tokens=MAX_TOKENS
    )
    # the mean log-probability is -1 for both lengths: shares 1/4 each
    scored_group = group(
        0, [1.0, 0.0, 0.0, 0.0], answer=["4", "5", "5", None], logprobs=[tokens(n) for n in (1, 2, 3, 4)]
    )
    entropy = -(0.25 * math.log(0.25) * 2 + 0.5 * math.log(0.5))
    factor = 1 / (1 + 0.5 / math.log(4) * entropy)
    expected = [episode.credit.advantage * factor for episode in episodes_of(plain, scored_group)]
    assert [episode.credit.advantage for episode in episodes_of(seed, scored_group)] == pytest.approx(
        expected, abs=1e-12
    )


def test_seed_grpo_leaves_out_completions_without_a_reward():
    seed = Algorithm.Config(advantage=GroupMean.Config(), seed_grpo=SeedGrpo.Config(alpha=1.0)).build(
        max_completion_tokens=MAX_TOKENS
    )
    episodes = episodes_of(seed, group(0, [1.0, 0.0, None, None], answer=["4", "5", "6", "6"]))
    # two answers of equal mass among the two that have a reward: H = log 2, alpha_eff = 1 / log 2
    assert [episode.credit.advantage for episode in episodes] == pytest.approx([0.25, -0.25, 0.0, 0.0], abs=1e-15)
    assert seed.group_metrics(episodes.groups)["semantic_entropy/max_possible"].value == math.log(2)


def test_empty_completion_is_excluded_from_the_semantic_entropy():
    seed = Algorithm.Config(advantage=GroupMean.Config(), seed_grpo=SeedGrpo.Config(alpha=1.0)).build(
        max_completion_tokens=MAX_TOKENS
    )
    lists = {"logprobs": [tokens(2), tokens(1), ()], "answer": ["4", "5", None]}
    metrics = seed.group_metrics(episodes_of(seed, group(0, [1.0, 0.0, 0.0], **lists)).groups)
    assert metrics["semantic_entropy/mean"].value == pytest.approx(math.log(2), abs=1e-12)
    assert metrics["semantic_entropy/max_possible"].value == math.log(2)


def test_length_penalty_uses_the_limit_that_the_prompt_was_sampled_with():
    algorithm = Algorithm.Config(truncation=Truncation.Config(mode="penalty", cache_tokens=4)).build(
        max_completion_tokens=MAX_TOKENS
    )
    both = group(0, [1.0, 1.0], logprobs=[tokens(6), tokens(8)])
    own = Group(prompt=replace(both.prompt, sampling=SamplingConfig(max_tokens=8)), samples=both.samples)
    assert [episode.credit.shaped_reward for episode in episodes_of(algorithm, both)] == [1.0, 1.0]
    assert [episode.credit.shaped_reward for episode in episodes_of(algorithm, own)] == [0.5, 0.0]


def test_length_and_likelihood_count_only_sampled_tokens():
    algorithm = Algorithm.Config(
        advantage=GroupMean.Config(),
        seed_grpo=SeedGrpo.Config(alpha=1.0),
        truncation=Truncation.Config(mode="penalty", cache_tokens=8),
    ).build(max_completion_tokens=MAX_TOKENS)
    tool = (True, True, *[False] * 10)  # two tokens of the policy, ten of an environment
    lists = {"logprobs": [tokens(2) + (0.0,) * 10, tokens(2)], "loss_mask": [tool, None], "answer": ["4", "5"]}
    episodes = episodes_of(algorithm, group(0, [1.0, 0.0], **lists))
    assert [episode.credit.shaped_reward for episode in episodes] == [1.0, 0.0]
    assert episodes[0].credit.advantage == pytest.approx(0.25, abs=1e-15)  # shares 1/2 and 1/2
    assert normalizers_of(algorithm, episodes).num_tokens == 4
