"""KL estimators and where the term goes."""

import math

import pytest
import torch

from tests.parts.algorithm import (
    MAX_TOKENS,
    episodes_of,
    group,
    normalizers_of,
    pack,
    policy_like,
    run_loss,
    spread_logprobs,
)
from torchtitan_rl.core.algorithm import KL, Algorithm, kl_estimate
from torchtitan_rl.library.objectives import GroupMean, SeqMeanTokenMean


@pytest.mark.parametrize(
    ("estimator", "log_ratio", "expected"),
    [
        ("k1", 0.5, 0.5),
        ("k1", -0.5, -0.5),
        ("k2", 0.5, 0.125),
        ("k2", -3.0, 4.5),
        ("k3", math.log(2), 0.5 + math.log(2) - 1),
        ("k3", -math.log(2), 2 - math.log(2) - 1),
        ("k3", -100.0, math.expm1(60.0) - 60.0),
        ("k3", 100.0, 59.0),
    ],
)
def test_kl_estimators_equal_their_closed_form(estimator, log_ratio, expected):
    assert kl_estimate(torch.tensor(log_ratio, dtype=torch.float64), estimator).item() == pytest.approx(
        expected, rel=1e-12
    )


def test_k3_is_accurate_at_small_ratios_in_float32():
    # k3(d) = d^2 / 2 - d^3 / 6 + ...: exp(-d) - 1 in float32 would be wrong in its first digit here
    assert kl_estimate(torch.tensor(1e-3), "k3").item() == pytest.approx(5e-7 - 1e-9 / 6, rel=1e-3)
    assert kl_estimate(torch.tensor(0.0), "k3").item() == 0.0


@pytest.mark.parametrize(
    ("log_ratio", "expected"),
    [
        (-59.0, 1 - math.exp(59)),
        (-60.0, 1 - math.exp(60)),
        (-61.0, 1 - math.exp(60)),
        (-1e9, 1 - math.exp(60)),
        (61.0, 1.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_gradient_points_to_the_reference_at_any_distance(log_ratio, expected, dtype):
    start = torch.tensor(log_ratio, dtype=dtype, requires_grad=True)
    value = kl_estimate(start, "k3")
    value.backward()
    assert torch.isfinite(value)
    assert start.grad.item() == pytest.approx(expected, rel=1e-5)


def test_kl_in_the_reward_counts_only_sampled_tokens():
    algorithm = Algorithm.Config(
        advantage=GroupMean.Config(), kl=KL.Config(coef=0.5, estimator="k1", placement="reward")
    ).build(max_completion_tokens=MAX_TOKENS)
    scored = group(0, [1.0, 0.0], logprobs=[(-1.0, 0.0, -1.0), (-2.0,)], loss_mask=[(1, 0, 1), (1,)])
    episodes = episodes_of(algorithm, scored, reference=[[-3.0, -50.0, -1.0], [-2.0]])
    assert [episode.credit.shaped_reward for episode in episodes] == [0.0, 0.0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_have_the_divergence_as_expectation(estimator):
    p, q = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64), torch.tensor([0.6, 0.25, 0.15], dtype=torch.float64)
    divergence = (p * (p / q).log()).sum().item()
    expectation = (p * kl_estimate((p / q).log(), estimator)).sum().item()
    assert expectation == pytest.approx(divergence, rel=0.15 if estimator == "k2" else 1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_is_zero_if_the_reference_equals_the_policy(estimator):
    algorithm = Algorithm.Config(kl=KL.Config(coef=0.1, estimator=estimator)).build(max_completion_tokens=MAX_TOKENS)
    reference = [[-1.0, -1.5], [-0.7, -1.1]]
    episodes = episodes_of(algorithm, group(0, [1.0, 0.0]), reference=reference)
    values = [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in reference]
    batch = pack(episodes, normalizers_of(algorithm, episodes), reference=reference)
    metrics = run_loss(algorithm, episodes, values, batch).metrics
    for key in ("loss/kl", "loss/kl_weighted", "reference/kl_k1", "reference/kl_k2", "reference/kl_k3"):
        assert metrics[key].value == 0.0


def test_kl_in_the_loss_is_aggregated_like_the_loss():
    algorithm = Algorithm.Config(
        advantage=GroupMean.Config(), aggregation=SeqMeanTokenMean.Config(), kl=KL.Config(coef=0.1, estimator="k2")
    ).build(max_completion_tokens=MAX_TOKENS)
    reference = [[-2.0, -1.0], [-4.0]]
    episodes = episodes_of(algorithm, group(0, [1.0, 0.0], logprobs=[(-1.0, -1.0), (-2.0,)]), reference=reference)
    batch = pack(episodes, normalizers_of(algorithm, episodes), reference=reference)
    values = policy_like(episodes)
    loss, metrics = run_loss(algorithm, episodes, values, batch)
    # policy part: mean over sequences of -A = -(0.5 - 0.5) / 2 = 0. k2: (0.5 + 0) / 2 and 2; their mean 1.125
    assert loss.item() == pytest.approx(0.1125, abs=1e-12)
    assert metrics["loss/kl"].value == pytest.approx(1.125, abs=1e-12)
    assert metrics["loss/kl_weighted"].value == pytest.approx(0.1125, abs=1e-12)


@pytest.mark.parametrize(("zero_variance", "pulled"), [("keep", True), ("drop", False)])
def test_kl_applies_to_every_token_in_the_loss(zero_variance, pulled):
    config = Algorithm.Config(kl=KL.Config(coef=0.1), zero_variance=zero_variance)
    algorithm = config.build(max_completion_tokens=MAX_TOKENS)
    reference = [[-3.0, -3.0]] * 4
    episodes = episodes_of(algorithm, group(0, [1.0, 1.0]), group(1, [1.0, 0.0]), reference=reference)
    batch = pack(episodes, normalizers_of(algorithm, episodes), reference=reference)
    values = policy_like(episodes, 0.2)
    run_loss(algorithm, episodes, values, batch).loss.backward()
    assert all(value.grad.all() if pulled else value.grad is None or not value.grad.any() for value in values[:2])
    assert all(value.grad.all() for value in values[2:])


def test_kl_in_the_reward_is_subtracted_before_the_advantage():
    algorithm = Algorithm.Config(
        advantage=GroupMean.Config(), kl=KL.Config(coef=0.5, estimator="k1", placement="reward")
    ).build(max_completion_tokens=MAX_TOKENS)
    scored = group(0, [1.0, 0.0], logprobs=[(-1.0, -1.0), (-2.0,)]), group(1, [1.0, 1.0])
    # sum of k1: (-1 + 3) + 0 = 2 and 0, so the rewards become 0 and 0 - 0; equal rewards part too
    reference = [[-3.0, -1.0], [-2.0], [-5.0, -5.0], [-1.0, -1.0]]
    episodes = episodes_of(algorithm, *scored, reference=reference)
    assert [episode.credit.shaped_reward for episode in episodes] == [0.0, 0.0, -3.0, 1.0]
    assert [episode.reward for episode in episodes] == [1.0, 0.0, 1.0, 1.0]
    assert [episode.credit.advantage for episode in episodes] == [0.0, 0.0, -2.0, 2.0]
    assert not algorithm.kl.in_loss
    assert algorithm.needs_reference


def test_missing_reference_is_an_error_with_a_remedy():
    loss = Algorithm.Config(kl=KL.Config(coef=0.5)).build(max_completion_tokens=MAX_TOKENS)
    for algorithm in (
        loss,
        Algorithm.Config(kl=KL.Config(coef=0.5, placement="reward")).build(max_completion_tokens=MAX_TOKENS),
    ):
        with pytest.raises(ValueError, match="prompt 0, sample 0: reference_logprobs = None"):
            episodes_of(algorithm, group(0, [1.0, 0.0]))
    episodes = episodes_of(loss, group(0, [1.0, 0.0]), reference=[[-1.0, -1.0]] * 2)
    batch = pack(episodes, normalizers_of(loss, episodes))
    values = spread_logprobs(batch, episodes, policy_like(episodes))
    with pytest.raises(ValueError, match="Load a reference model"):
        loss.loss(batch, values, torch.zeros_like(values))


def test_micro_batch_of_padding_needs_no_reference():
    algorithm = Algorithm.Config(kl=KL.Config(coef=0.5)).build(max_completion_tokens=MAX_TOKENS)
    episodes = episodes_of(algorithm, group(0, [1.0, 0.0]), reference=[[-1.0, -1.0]] * 2)
    values = policy_like(episodes)
    batch = pack(episodes, normalizers_of(algorithm, episodes), order=[], padding=4)
    loss = run_loss(algorithm, episodes, values, batch).loss
    loss.backward()
    assert loss.item() == 0.0
