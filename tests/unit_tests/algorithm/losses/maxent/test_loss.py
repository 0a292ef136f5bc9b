"""MaxEnt-GRPO's listwise loss through `Algorithm`."""

import math
from dataclasses import replace

import pytest

from tests.parts.algorithm import built, episodes_of, group, normalizers_of, pack, policy_like, run_loss
from torchtitan_rl.algorithm import Algorithm, MaxEnt, maxent_class_defaults
from torchtitan_rl.algorithm.losses.distillation import Distill
from torchtitan_rl.observe.metrics.reward_stats import advantage_metrics

SIGMOID_1 = math.e / (math.e + 1)


def maxent(**kwargs) -> Algorithm:
    """The defaults of the authors' class, with `kwargs`."""
    loss = replace(maxent_class_defaults(), **{"q_floor": 0.0, "neutral": "skip"} | kwargs)
    return built(loss=loss)


def test_missing_reference_is_an_error():
    assert not maxent().needs_reference
    algorithm = maxent(beta=1.0)
    assert algorithm.needs_reference
    with pytest.raises(ValueError, match="sample 0: reference_logprobs = None"):
        episodes_of(algorithm, group(0, [1.0, 0.0]))


def test_equal_rewards_have_no_gradient_by_default():
    algorithm = maxent()
    episodes = episodes_of(algorithm, group(0, [0.1] * 3), group(1, [1.0, 0.0]))
    assert [episode.credit.columns["mass"] for episode in episodes[:3]] == [1 / 3] * 3
    assert [episode.credit.left_out for episode in episodes] == ["no preference"] * 3 + [None] * 2
    values = policy_like(episodes, 0.5)
    run_loss(algorithm, episodes, values, pack(episodes, normalizers_of(algorithm, episodes))).loss.backward()
    assert all(not value.grad.any() for value in values[:3])


@pytest.mark.parametrize("floor", [0.0, 0.01])
def test_the_best_has_all_mass_but_the_floor_at_temperature_0(floor):
    episodes = episodes_of(maxent(q_temperature=0.0, q_floor=floor), group(0, [1.0, 0.0]))
    assert [e.credit.columns["q_mass"] for e in episodes] == pytest.approx([1 - floor, floor], abs=1e-12)


def test_group_of_one_completion_has_the_whole_mass():
    algorithm = maxent(neutral="uniform")
    episodes = episodes_of(algorithm, group(0, [1.0]))
    assert (episodes[0].in_loss, episodes[0].credit.columns["mass"]) == (True, 1.0)
    assert algorithm.group_metrics(episodes.groups)["maxent/weight_entropy/mean"].value == 0


def test_weight_metrics_of_a_step():
    algorithm = maxent()
    episodes = episodes_of(algorithm, group(0, [1.0, 0.0]), group(1, [0.0, 0.0]))
    recorded = algorithm.group_metrics(episodes.groups) | advantage_metrics(episodes.groups)
    metrics = {key: metric.value for key, metric in recorded.items()}
    h = -(SIGMOID_1 * math.log(SIGMOID_1) + (1 - SIGMOID_1) * math.log(1 - SIGMOID_1))
    expected = {
        "maxent/tau": 1.0,
        "maxent/beta": 0.0,
        "maxent/weight_entropy/min": h,  # the neutral group is left out
        "maxent/weight_entropy/max": h,
        "maxent/weight_entropy_with_neutral/mean": (h + math.log(2)) / 2,
        "maxent/weight_entropy_with_neutral/min": h,
        "maxent/weight_entropy_with_neutral/max": math.log(2),
        "maxent/q_entropy/min": h,
        "maxent/q_entropy/max": math.log(2),
        "groups/effective_rollouts": (math.exp(h) + 2) / 2,
        "groups/incorrect_mass": ((1 - SIGMOID_1) + 1.0) / 2,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, abs=1e-12)


def test_pushes_whose_squares_underflow_have_no_correlation():
    algorithm = maxent(tau=0.02)
    episodes = episodes_of(algorithm, group(0, [10.0, 0.0], logprobs=[(-1.0,), (-1.0,) * 600]))
    metrics = algorithm.group_metrics(episodes.groups)
    assert metrics["maxent/weight_entropy/mean"].value < 1e-200
    assert "maxent/push_reward_correlation/mean" not in metrics


def test_another_loss_as_the_clip_loss_is_refused():
    with pytest.raises(ValueError, match=r"algorithm\.loss\.clip = Distill.*: expected Clip\.Config"):
        MaxEnt.Config(clip=Distill.Config())
