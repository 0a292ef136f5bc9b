"""Every metric against its formula, and merges that are exact."""

import math

import pytest
import torch

from tests.parts.algorithm import (
    MAX_TOKENS,
    episodes_of,
    group,
    merge,
    normalizers_of,
    numbers,
    pack,
    run_loss,
)
from torchtitan_rl.core.algorithm import Algorithm, Clip
from torchtitan_rl.core.algorithm.loss_metrics import MAX_DISTRIBUTION_VALUES, Tally
from torchtitan_rl.library.objectives import Cispo, GroupMean, Gspo, Reinforce
from torchtitan_rl.library.seed_grpo import SeedGrpo


def test_semantic_entropy_metrics_of_a_step():
    algorithm = Algorithm.Config(seed_grpo=SeedGrpo.Config(alpha=0.5)).build(max_completion_tokens=MAX_TOKENS)
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
    metrics = numbers(algorithm.group_metrics(episodes.groups))
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, abs=1e-12)


def off_policy_metrics(config: Algorithm.Config, ratios: list[list[float]], rewards: list[float]) -> dict[str, float]:
    algorithm = config.build(max_completion_tokens=MAX_TOKENS)
    logprobs = [(-1.0,) * len(row) for row in ratios]
    episodes = episodes_of(algorithm, group(0, rewards, logprobs=logprobs))
    batch = pack(
        episodes,
        normalizers_of(algorithm, episodes),
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
        # KL(pi_old || pi): with r = pi / pi_old, k1 = -log r and k3 = r - 1 - log r
        "policy/kl_k1": -(2 * math.log(1.5) + 2 * math.log(0.5)) / 6,
        "policy/kl_k2": (math.log(1.5) ** 2 + math.log(0.5) ** 2) / 6,
        "policy/kl_k3": 2 * ((0.5 - math.log(1.5)) + (-0.5 - math.log(0.5))) / 6,
        "policy/entropy": 0.7,
        "loss/entropy": 0.7,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, abs=1e-12)


def test_policy_kl_is_measured_against_the_sampling_policy():
    """Tokens are drawn from pi_old, so the means of k1 and k3 are KL(pi_old || pi), to the last digit of this draw."""
    old, new = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
    drawn = [0, 0, 1, 2]  # as often as pi_old has it
    metrics = off_policy_metrics(Algorithm.Config(), [[new[token] / old[token] for token in drawn]] * 2, [1.0, 0.0])
    divergence = sum(p * math.log(p / q) for p, q in zip(old, new))
    assert metrics["policy/kl_k1"] == pytest.approx(divergence, abs=1e-12)
    assert metrics["policy/kl_k3"] == pytest.approx(divergence, abs=1e-12)


def test_cispo_reports_capped_tokens_as_clipped_and_reinforce_reports_none():
    cispo = off_policy_metrics(Algorithm.Config(loss=Cispo.Config(cap=1.2)), [[1.5, 1.0], [1.5, 0.5]], [1.0, 0.0])
    assert (cispo["ratio/clip_fraction_high"], cispo["ratio/clip_fraction_low"]) == (0.5, 0.0)
    floor = Algorithm.Config(loss=Cispo.Config(cap=1.2, floor=0.8))
    assert off_policy_metrics(floor, [[1.5, 1.0], [0.5, 0.7]], [1.0, 0.0])["ratio/clip_fraction_low"] == 0.5
    reinforce = off_policy_metrics(Algorithm.Config(loss=Reinforce.Config()), [[1.5], [1.5]], [1.0, 0.0])
    assert "ratio/clip_fraction" not in reinforce
    assert "ratio/overflow_fraction" not in reinforce  # no ratio in its loss


def test_dual_clipped_tokens_are_clipped_tokens():
    # sequence 0 has A > 0, sequence 1 A < 0: 1.5 is clipped above in the first, bounded by the dual clip in the second
    config = Algorithm.Config(loss=Clip.Config(dual_clip=1.4))
    metrics = off_policy_metrics(config, [[1.5, 1.0], [1.5, 0.5, 1.3]], [1.0, 0.0])
    assert metrics["ratio/clip_fraction"] == 3 / 5
    assert [metrics[f"ratio/clip_fraction_{side}"] for side in ("low", "high", "dual")] == [1 / 5] * 3


@pytest.mark.parametrize(("loss", "expected"), [(Clip.Config(), 1.0), (Gspo.Config(), 0.0)])
def test_overflow_metric_counts_only_clamped_ratios(loss, expected):
    ratios = [[math.exp(25), math.exp(-25)], [math.exp(25), math.exp(-25)]]  # a sequence's mean log ratio is 0
    assert off_policy_metrics(Algorithm.Config(loss=loss), ratios, [1.0, 0.0])["ratio/overflow_fraction"] == expected


def test_loss_parts_are_reported_with_sign_and_add_up():
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
    k3 = 1.5 - 1 - math.log(1.5)
    expected = k3 * length / (length + 40) if name == "33-64" else k3
    assert metrics[f"policy/kl_k3/length_{name}"] == pytest.approx(expected, abs=1e-12)
    present = {key for key in metrics if key.startswith("policy/kl_k3/length_")}
    assert present == {f"policy/kl_k3/length_{name}", "policy/kl_k3/length_33-64"}


def test_kl_buckets_report_their_token_counts():
    metrics = off_policy_metrics(Algorithm.Config(), [[1.5] * 3, [1.0] * 40], [1.0, 0.0])
    found = {key: value for key, value in metrics.items() if key.startswith("policy/tokens/")}
    assert found == {"policy/tokens/length_0-32": 3.0, "policy/tokens/length_33-64": 40.0}


def test_a_mean_over_two_ranks_weighs_by_count():
    def rank(values):
        tally = Tally()
        tally.mean("x", torch.tensor(values), torch.ones(len(values)))
        return tally.to_metrics(tally.numbers())

    assert merge([rank([1.0, 1.0, 1.0]), rank([0.0])]) == {"x": 0.75}
    assert rank([]) == {}


def test_entropy_and_logprob_diff_are_distributions_over_loss_tokens():
    algorithm = Algorithm.Config().build(max_completion_tokens=MAX_TOKENS)
    episodes = episodes_of(algorithm, group(0, [1.0, 0.0, None], logprobs=[(-1.0, -2.0), (-3.0,), (-4.0,)]))
    batch = pack(episodes, normalizers_of(algorithm, episodes), padding=3)
    values = [torch.tensor(v, dtype=torch.float64) for v in ([-1.5, -2.0], [-3.25], [-9.0])]
    metrics = run_loss(algorithm, episodes, values, batch).metrics
    diffs, entropies = metrics["sampler/logprob_diff"], metrics["policy/token_entropy"]
    assert diffs.reduction == entropies.reduction == "distribution"
    assert diffs.value.tolist() == [0.5, 0.0, 0.25]
    assert entropies.value.tolist() == pytest.approx([0.7] * 3)


@pytest.mark.parametrize(("count", "kept"), [(4096, 4096), (4097, 2049), (10000, 3334)])
def test_long_distribution_is_subsampled_evenly(count, kept):
    tally = Tally()
    tally.distribution("x", torch.arange(count), torch.ones(count))
    tally.put("y", torch.zeros(()), reduction="sum")
    values = tally.to_metrics(tally.numbers())["x"].value
    assert len(values) == kept <= MAX_DISTRIBUTION_VALUES
    assert len(values.diff().unique()) == 1


def test_effective_sample_size_is_a_fraction_of_the_tokens():
    algorithm = Algorithm.Config().build(max_completion_tokens=MAX_TOKENS)
    episodes = episodes_of(algorithm, group(0, [1.0, 0.0], logprobs=[(-1.0, -1.0), (-1.0,)]))
    batch = pack(episodes, normalizers_of(algorithm, episodes), padding=5)
    values = [torch.tensor([-1 + math.log(w) for w in row], dtype=torch.float64) for row in ([1.0, 2.0], [3.0])]
    metric = run_loss(algorithm, episodes, values, batch).metrics["sampler/effective_sample_size"]
    assert metric.value == pytest.approx((1 + 2 + 3) ** 2 / (3 * (1 + 4 + 9)), abs=1e-12)
    assert (metric.reduction, metric.weight) == ("mean", 3.0)
