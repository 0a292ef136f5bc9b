"""Every metric against its formula, and merges that are exact."""

import math

import pytest
import torch

from tests.parts.algorithm import MAX_TOKENS, built, episodes_of, group, merge, normalizers_of, numbers, pack, run_loss
from torchtitan_rl.algorithm import Algorithm, Clip, GroupMean
from torchtitan_rl.algorithm.loss_metrics import Tally
from torchtitan_rl.algorithm.losses.seed_grpo import SeedGrpo


def test_semantic_entropy_metrics_of_a_step():
    algorithm = built(seed_grpo=SeedGrpo.Config(alpha=0.5))
    episodes = episodes_of(algorithm, group(0, [1.0, 0.0], answer=["4", "5"]), group(1, [1.0, 0.0], answer=["4", "4"]))
    expected = {
        "semantic_entropy/mean": math.log(2) / 2,
        "semantic_entropy/std": math.log(2) / 2,
        "semantic_entropy/min": 0.0,
        "semantic_entropy/max": math.log(2),
        "semantic_entropy/scale/mean": (1 / 1.5 + 1) / 2,
        "semantic_entropy/scale/min": 1 / 1.5,
        "semantic_entropy/scale/max": 1.0,
    }
    metrics = numbers(algorithm.group_metrics(episodes.groups))
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, abs=1e-12)


def off_policy_metrics(config: Algorithm.Config, ratios: list[list[float]], rewards: list[float]) -> dict[str, float]:
    algorithm = config.build(max_completion_tokens=MAX_TOKENS)
    logprobs = [(-1.0,) * len(row) for row in ratios]
    episodes = episodes_of(algorithm, group(0, rewards, logprobs=logprobs))
    batch = pack(episodes, normalizers_of(algorithm, episodes), old=[[-1.0] * len(row) for row in ratios])
    values = [torch.tensor([-1 + math.log(r) for r in row], dtype=torch.float64, requires_grad=True) for row in ratios]
    return numbers(run_loss(algorithm, episodes, values, batch).metrics)


def test_ratio_and_clip_fractions():
    # sequence 0 has A > 0, sequence 1 A < 0: only 1.5 in the first and 0.5 in the second are clipped
    ratios = [[1.5, 0.5, 1.0], [0.5, 1.5, 1.0]]
    metrics = off_policy_metrics(Algorithm.Config(), ratios, [1.0, 0.0])
    expected = {
        "ratio/mean": 1.0,
        "ratio/min": 0.5,
        "ratio/max": 1.5,
        "ratio/clip_fraction": 2 / 6,
        "ratio/clip_fraction_high": 1 / 6,
        "ratio/clip_fraction_high_min": 0.0,
        "ratio/clip_fraction_high_max": 1 / 3,
        "ratio/clip_fraction_low": 1 / 6,
        "ratio/clip_fraction_low_min": 0.0,
        "ratio/clip_fraction_low_max": 1 / 3,
        "ratio/overflow_fraction": 0.0,
        # KL(pi_old || pi): with r = pi / pi_old, k1 = -log r and k3 = r - 1 - log r
        "policy/kl_k1": -(2 * math.log(1.5) + 2 * math.log(0.5)) / 6,
        "policy/kl_k2": (math.log(1.5) ** 2 + math.log(0.5) ** 2) / 6,
        "policy/kl_k3": 2 * ((0.5 - math.log(1.5)) + (-0.5 - math.log(0.5))) / 6,
        "policy/entropy": 0.7,
        "loss/entropy": 0.7,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, abs=1e-12)


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


def test_a_mean_over_two_ranks_weighs_by_count():
    def rank(values):
        tally = Tally()
        tally.mean("x", torch.tensor(values), torch.ones(len(values)))
        return tally.to_metrics(tally.numbers())

    assert merge([rank([1.0, 1.0, 1.0]), rank([0.0])]) == {"x": 0.75}
    assert rank([]) == {}


def test_one_token_is_enough_for_a_mean_and_a_distribution():
    tally = Tally()
    values, mask = torch.tensor([5.0, 0.5]), torch.tensor([0.0, 1.0])
    tally.mean("x/mean", values, mask)
    tally.distribution("x", values, mask)
    metrics = tally.to_metrics(tally.numbers())
    assert (metrics["x/mean"].value, metrics["x/mean"].weight, metrics["x"].value.tolist()) == (0.5, 1.0, [0.5])


def test_step_without_groups_has_counts_of_zero_and_no_metrics():
    algorithm = built(seed_grpo=SeedGrpo.Config())
    counts = normalizers_of(algorithm, episodes_of(algorithm))
    assert (counts.num_tokens, counts.num_sequences, counts.num_groups) == (0, 0, 0)
    assert algorithm.group_metrics([]) == {}


def test_entropy_and_logprob_diff_are_distributions_over_loss_tokens():
    algorithm = built()
    episodes = episodes_of(algorithm, group(0, [1.0, 0.0, None], logprobs=[(-1.0, -2.0), (-3.0,), (-4.0,)]))
    batch = pack(episodes, normalizers_of(algorithm, episodes), padding=3)
    values = [torch.tensor(v, dtype=torch.float64) for v in ([-1.5, -2.0], [-3.25], [-9.0])]
    metrics = run_loss(algorithm, episodes, values, batch).metrics
    diffs, entropies = metrics["sampler/logprob_diff"], metrics["policy/token_entropy"]
    assert diffs.reduction == entropies.reduction == "distribution"
    assert diffs.value.tolist() == [0.5, 0.0, 0.25]
    assert entropies.value.tolist() == pytest.approx([0.7] * 3)


def test_mismatch_statistics_are_logged_even_without_a_correction():
    algorithm = built()
    episodes = episodes_of(algorithm, group(0, [1.0, 0.0], logprobs=[(-1.0, -2.0), (-1.0, -1.0)]))
    batch = pack(episodes, normalizers_of(algorithm, episodes))
    values = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in ([-1.5, -2.0], [-1.0, 0.0])]
    metrics = run_loss(algorithm, episodes, values, batch).metrics
    down, up = math.exp(-0.5), math.exp(1.0)  # pi_old / mu of the two tokens that differ
    expected = {
        "sampler/logprob_diff/mean": 1.5 / 4,
        "sampler/logprob_diff/max": 1.0,
        "sampler/importance_weight/mean": (down + up + 2) / 4,
        "sampler/importance_weight/min": down,
        "sampler/importance_weight/max": up,
        "sampler/corrected_fraction": 0.0,
        # k3 of KL(mu || pi_old) at samples of mu: w - 1 - log w
        "sampler/kl": ((down - 1 + 0.5) + (up - 1 - 1.0)) / 4,
    }
    assert {key: metrics[key].value for key in expected} == pytest.approx(expected, abs=1e-12)
