"""Every metric against its formula, and merges that are exact."""

import math

import pytest
import torch

from tests.unit_tests.algorithm.algorithm_builders import MAX_TOKENS, episodes_of, group, merge, pack, run_loss, scored
from torchtitan_rl.algorithm import Algorithm, Cispo, Clip, GroupMean, Reinforce, SeedGrpo, Truncation
from torchtitan_rl.algorithm.metrics.loss_metrics import LENGTH_BUCKETS, bucket_name
from torchtitan_rl.algorithm.metrics.summary import describe, quantile
from torchtitan_rl.algorithm.metrics.tally import Tally


def numbers(metrics) -> dict[str, float]:
    return {key: metric.value for key, metric in metrics.items()}


def test_rewards_groups_and_advantages():
    algorithm = Algorithm.Config(advantage=GroupMean.Config()).build()
    breakdown = [{"correct": 1.0, "format": None}, {"correct": 0.0, "format": 0.5}]
    episodes = episodes_of(
        algorithm,
        group(0, [1.0, 0.0], breakdown=breakdown),
        group(1, [0.0, 0.0]),
        group(2, [2.0, 1.0]),
        group(3, [None, None]),
    )
    metrics = numbers(algorithm.episode_metrics(episodes))
    rewards = [1.0, 0.0, 0.0, 0.0, 2.0, 1.0]
    expected = {
        "reward/mean": 4 / 6,
        "reward/std": math.sqrt(6 / 6 - (4 / 6) ** 2),
        "reward/min": 0.0,
        "reward/max": 2.0,
        "reward/p50": 0.5,
        "reward/p95": 1.75,  # rank 4.75 of 0..5: 1 + 0.75 * (2 - 1)
        "reward/correct/mean": 0.5,
        "reward/format/mean": 0.5,  # None is no value
        "reward/shaped/mean": 4 / 6,
        "groups/zero_variance_fraction": 1 / 3,  # the group without rewards is not one of three
        "groups/all_wrong_fraction": 1 / 3,
        "groups/all_right_fraction": 1 / 3,
        "groups/mixed_fraction": 1 / 3,
        "advantage/mean": 0.0,
        "advantage/std": math.sqrt(4 * 0.25 / 6),
        "advantage/min": -0.5,
        "advantage/max": 0.5,
        "advantage/positive_fraction": 2 / 6,
        "loss/completion_fraction": 6 / 8,
        "nonfinite/completions": 0.0,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, abs=1e-12)
    assert quantile(rewards, 50) == 0.5


def test_merging_the_copies_of_several_ranks_changes_nothing():
    algorithm = Algorithm.Config(seed_grpo=SeedGrpo.Config(), entropy_coef=0.1).build()
    metrics = algorithm.episode_metrics(episodes_of(algorithm, group(0, [1.0, 0.0])))
    assert merge([metrics] * 4) == merge([metrics])


def test_shaping_and_the_entropy_bonus_show_beside_the_plain_reward():
    algorithm = Algorithm.Config(entropy_coef=0.5, truncation=Truncation.Config(mode="penalty", cache_tokens=8)).build()
    episodes = episodes_of(algorithm, group(0, [1.0, 0.0], logprobs=[(-1.0,) * 12, (-2.0, -4.0)]))
    metrics = numbers(algorithm.episode_metrics(episodes))
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/shaped/mean"] == 0.25  # 1 - 0.5 and 0
    assert metrics["reward/with_entropy/mean"] == pytest.approx((0.5 + 0.5 * 1 + 0.0 + 0.5 * 3) / 2)


def test_semantic_entropy():
    algorithm = Algorithm.Config(seed_grpo=SeedGrpo.Config(alpha=0.5)).build()
    episodes = episodes_of(algorithm, group(0, [1.0, 0.0], answer=["4", "5"]), group(1, [1.0, 0.0], answer=["4", "4"]))
    expected = {
        "semantic_entropy/mean": math.log(2) / 2,
        "semantic_entropy/std": math.log(2) / 2,
        "semantic_entropy/min": 0.0,
        "semantic_entropy/max": math.log(2),
        "semantic_entropy/scale/mean": (1 / 1.5 + 1) / 2,
        "semantic_entropy/scale/min": 1 / 1.5,
        "semantic_entropy/scale/max": 1.0,
        "semantic_entropy/effective_alpha": 0.5 / math.log(2),
        "semantic_entropy/max_possible": math.log(2),
    }
    metrics = numbers(algorithm.episode_metrics(episodes))
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, abs=1e-12)


def test_no_episodes_no_keys():
    assert Algorithm.Config(seed_grpo=SeedGrpo.Config()).build().episode_metrics([]) == {}
    assert describe("x", []) == {}


def off_policy_metrics(config: Algorithm.Config, ratios: list[list[float]], rewards: list[float]) -> dict[str, float]:
    algorithm = config.build()
    logprobs = [(-1.0,) * len(row) for row in ratios]
    episodes = episodes_of(algorithm, group(0, rewards, logprobs=logprobs))
    batch = pack(
        episodes,
        algorithm.normalizers(episodes, max_completion_tokens=MAX_TOKENS),
        old=[[-1.0] * len(row) for row in ratios],
    )
    values = [torch.tensor([-1 + math.log(r) for r in row], dtype=torch.float64, requires_grad=True) for row in ratios]
    return numbers(run_loss(algorithm, episodes, values, batch).metrics)


def test_ratio_and_clip_fractions():
    # sequence 0 has A > 0, sequence 1 A < 0: only 1.5 in the first and 0.5 in the second are clipped
    ratios = [[1.5, 0.5, 1.0, 1.0], [0.5, 1.5]]
    metrics = off_policy_metrics(Algorithm.Config(), ratios, [1.0, 0.0])
    expected = {
        "ratio/mean": 1.0,
        "ratio/min": 0.5,
        "ratio/max": 1.5,
        "ratio/clip_fraction": 2 / 6,
        "ratio/clip_fraction_high": 1 / 6,
        "ratio/clip_fraction_high_min": 0.0,
        "ratio/clip_fraction_high_max": 1 / 4,
        "ratio/clip_fraction_low": 1 / 6,
        "ratio/clip_fraction_low_min": 0.0,
        "ratio/clip_fraction_low_max": 1 / 2,
        "ratio/overflow_fraction": 0.0,
        "policy/kl_k1": (2 * math.log(1.5) + 2 * math.log(0.5)) / 6,
        "policy/kl_k2": (math.log(1.5) ** 2 + math.log(0.5) ** 2) / 6,
        "policy/kl_k3": 2 * ((1 / 1.5 - 1 + math.log(1.5)) + (2 - 1 + math.log(0.5))) / 6,
        "policy/entropy": 0.7,
        "loss/entropy": 0.7,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, abs=1e-12)


def test_cispo_counts_what_its_cap_bounds_and_reinforce_clips_nothing():
    cispo = off_policy_metrics(Algorithm.Config(loss=Cispo.Config(cap=1.2)), [[1.5, 1.0], [1.5, 0.5]], [1.0, 0.0])
    assert (cispo["ratio/clip_fraction_high"], cispo["ratio/clip_fraction_low"]) == (0.5, 0.0)
    reinforce = off_policy_metrics(Algorithm.Config(loss=Reinforce.Config()), [[1.5], [1.5]], [1.0, 0.0])
    assert "ratio/clip_fraction" not in reinforce


def test_losses_are_reported_with_their_sign_and_add_up():
    config = Algorithm.Config(advantage=GroupMean.Config(), loss=Clip.Config(), entropy_coef=0.1)
    metrics = off_policy_metrics(config, [[1.1, 1.0], [1.0]], [1.0, 0.0])
    policy = (-1.1 * 0.5 - 0.5 + 0.5) / 3
    expected = {"loss/policy": policy, "loss/entropy_weighted": -0.07, "loss/total": policy - 0.07}
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("length", "name"),
    [(1, "0-32"), (32, "0-32"), (33, "33-64"), (65, "65-128"), (256, "129-256"), (257, "257+"), (999, "257+")],
)
def test_kl_by_completion_length(length, name):
    metrics = off_policy_metrics(Algorithm.Config(), [[1.5] * length, [1.0] * 40], [1.0, 0.0])
    k3 = 1 / 1.5 - 1 + math.log(1.5)
    expected = k3 * length / (length + 40) if name == "33-64" else k3
    assert metrics[f"policy/kl_k3/length_{name}"] == pytest.approx(expected, abs=1e-12)
    present = {key for key in metrics if key.startswith("policy/kl_k3/length_")}
    assert present == {f"policy/kl_k3/length_{name}", "policy/kl_k3/length_33-64"}


def test_tokens_by_completion_length_count_what_is_in_the_loss():
    algorithm = Algorithm.Config().build()
    episodes = episodes_of(algorithm, group(0, [1.0, 0.0, None], logprobs=[(-1.0,) * 40, (-1.0,) * 2, (-1.0,) * 50]))
    metrics = numbers(algorithm.episode_metrics(episodes))
    tokens = {key: value for key, value in metrics.items() if key.endswith("/tokens")}
    assert tokens == {"policy/kl_k3/length_0-32/tokens": 2.0, "policy/kl_k3/length_33-64/tokens": 40.0}


def test_the_buckets_hold_every_length_once():
    assert [bucket_name(bucket) for bucket in LENGTH_BUCKETS] == ["0-32", "33-64", "65-128", "129-256", "257+"]
    for length in range(1000):
        assert sum(first <= length <= (last or math.inf) for first, last in LENGTH_BUCKETS) == 1


def test_a_mean_over_two_ranks_weighs_by_count():
    def rank(values):
        tally = Tally()
        tally.mean("x", torch.tensor(values), torch.ones(len(values)))
        return tally.to_metrics()

    assert merge([rank([1.0, 1.0, 1.0]), rank([0.0])]) == {"x": 0.75}
    assert rank([]) == {}
    assert Tally().to_metrics() == {}


def test_all_values_are_plain_floats():
    algorithm = Algorithm.Config().build()
    episodes = episodes_of(algorithm, [scored(0, 0, 1.0), scored(0, 1, 0.0)])
    batch = pack(episodes, algorithm.normalizers(episodes, max_completion_tokens=MAX_TOKENS))
    values = [torch.tensor([-1.0, -1.0], requires_grad=True) for _ in episodes]
    metrics = algorithm.episode_metrics(episodes) | run_loss(algorithm, episodes, values, batch).metrics
    assert all(type(metric.value) is float and isinstance(metric.weight, float) for metric in metrics.values())
