"""MaxEnt-GRPO's listwise loss through `Algorithm`."""

import math
from dataclasses import replace

import pytest
import torch

from tests.parts.algorithm import (
    built,
    episodes_of,
    group,
    normalizers_of,
    pack,
    policy_like,
    run_loss,
)
from torchtitan_rl.algorithm import (
    KL,
    Algorithm,
    Clip,
    GroupMean,
    MaxEnt,
    Reinforce,
    SeqMeanTokenMean,
    TokenTruncate,
    maxent_class_defaults,
)
from torchtitan_rl.algorithm.losses.distillation import Distill
from torchtitan_rl.algorithm.losses.seed_grpo import SeedGrpo
from torchtitan_rl.observe.metrics.reward_stats import advantage_metrics

SIGMOID_1 = math.e / (math.e + 1)


def maxent(**kwargs) -> Algorithm:
    """The defaults of the authors' class, with `kwargs`."""
    loss = replace(maxent_class_defaults(), **{"q_floor": 0.0, "neutral": "skip"} | kwargs)
    return built(loss=loss)


def packed(algorithm, episodes, **kwargs):
    return pack(episodes, normalizers_of(algorithm, episodes), **kwargs)


def test_reference_contributes_its_logprob_per_token():
    scored_group = group(0, [1.0, 0.0], logprobs=[(-1.0, -1.0), (-1.0,)])
    reference = [[-3.0, -1.0], [-1.0]]  # per token -2 and -1; in sum -4 and -1
    by_length = episodes_of(maxent(beta=1.0), scored_group, reference=reference)
    assert by_length[0].credit.columns["mass"] == pytest.approx(0.5, abs=1e-12)  # 1 - 2 against 0 - 1
    in_sum = episodes_of(maxent(beta=1.0, normalize_reference=False), scored_group, reference=reference)
    assert in_sum[0].credit.columns["mass"] == pytest.approx(1 / (1 + math.e**2), abs=1e-12)  # 1 - 4 against 0 - 1
    assert maxent(beta=1.0).needs_reference
    assert not maxent().needs_reference
    with pytest.raises(ValueError, match="sample 0: reference_logprobs = None"):
        episodes_of(maxent(beta=1.0), scored_group)


def test_equal_rewards_have_no_gradient_by_default():
    algorithm = maxent()
    episodes = episodes_of(algorithm, group(0, [0.1] * 3), group(1, [1.0, 0.0]))
    assert [episode.credit.columns["mass"] for episode in episodes[:3]] == [1 / 3] * 3
    assert [episode.credit.left_out for episode in episodes] == ["no preference"] * 3 + [None] * 2
    values = policy_like(episodes, 0.5)
    run_loss(algorithm, episodes, values, packed(algorithm, episodes)).loss.backward()
    assert all(not value.grad.any() for value in values[:3])
    uniform = maxent(neutral="uniform")
    episodes = episodes_of(uniform, group(0, [0.1] * 3))
    values = policy_like(episodes, 0.5)
    run_loss(uniform, episodes, values, packed(uniform, episodes)).loss.backward()
    assert any(value.grad.any() for value in values)


def test_equal_rewards_pull_to_the_uniform_distribution_with_the_class_s_defaults():
    algorithm = built(loss=maxent_class_defaults())
    episodes = episodes_of(algorithm, group(0, [1.0, 1.0]))
    assert [(e.credit.left_out, e.credit.columns["mass"]) for e in episodes] == [(None, 0.5)] * 2


@pytest.mark.parametrize("floor", [0.0, 0.01])
def test_the_best_has_all_mass_but_the_floor_at_temperature_0(floor):
    episodes = episodes_of(maxent(q_temperature=0.0, q_floor=floor), group(0, [1.0, 0.0]))
    assert [e.credit.columns["q_mass"] for e in episodes] == pytest.approx([1 - floor, floor], abs=1e-12)


def test_group_of_one_completion_has_the_whole_mass():
    algorithm = maxent(neutral="uniform")
    episodes = episodes_of(algorithm, group(0, [1.0]))
    assert (episodes[0].in_loss, episodes[0].credit.columns["mass"]) == (True, 1.0)
    assert algorithm.group_metrics(episodes.groups)["maxent/weight_entropy/mean"].value == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kl": KL.Config(coef=0.1)}, r"algorithm\.kl\.coef = 0\.1: expected 0\.0 with MaxEnt"),
        ({"seed_grpo": SeedGrpo.Config()}, r"algorithm\.seed_grpo = .*: expected None with MaxEnt"),
        ({"advantage": GroupMean.Config()}, r"algorithm\.advantage = .*with MaxEnt"),
        ({"aggregation": SeqMeanTokenMean.Config()}, r"algorithm\.aggregation = .*with MaxEnt"),
        ({"mismatch": TokenTruncate.Config()}, r"algorithm\.mismatch = .*with MaxEnt"),
    ],
)
def test_settings_without_effect_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        Algorithm.Config(loss=maxent_class_defaults(), **config)
    Algorithm.Config(loss=Reinforce.Config(), **config)


def test_another_loss_as_the_clip_loss_is_refused():
    with pytest.raises(ValueError, match=r"algorithm\.loss\.clip = Distill.*: expected Clip\.Config"):
        MaxEnt.Config(clip=Distill.Config())


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


def test_the_clip_loss_of_sequences_is_summed_over_the_group():
    clip = {"clip_coef": 0.5, "clip": Clip.Config(eps_high=0.1)}
    listwise, both = maxent(), maxent(clip_ratio="sequence", **clip)
    groups = group(0, [1.0, 0.0], logprobs=[(-1.0, -1.0), (-1.0,)]), group(1, [1.0, 0.0], logprobs=[(-1.0,)] * 2)
    episodes = episodes_of(both, *groups)
    old = [[-1.0, -1.0], [-1.0], [-1.0], [-1.0]]
    # sequence ratios 1.2 * 1.25 = 1.5 (clipped at 1.1), 0.9, and 1 in the second group
    rows = [[1.2, 1.25], [0.9], [1.0], [1.0]]
    values = [torch.tensor([-1 + math.log(r) for r in row], dtype=torch.float64, requires_grad=True) for row in rows]
    outputs = [
        run_loss(algorithm, episodes, values, packed(algorithm, episodes, old=old)) for algorithm in (listwise, both)
    ]
    advantage = SIGMOID_1 - 0.5
    clip_loss = 0.5 * (-1.1 * advantage + 0.9 * advantage) / 2  # of two groups; the second sums to 0
    assert outputs[1].loss.item() - outputs[0].loss.item() == pytest.approx(clip_loss, abs=1e-12)
    metrics = outputs[1].metrics
    assert metrics["loss/clip"].value == pytest.approx(clip_loss, abs=1e-12)
    assert metrics["loss/listwise"].value == pytest.approx(outputs[0].loss.item(), abs=1e-12)
    assert metrics["ratio/max"].value == pytest.approx(1.5, abs=1e-12)
    (outputs[1].loss - outputs[0].loss).backward()
    assert values[0].grad.tolist() == pytest.approx([0.0, 0.0], abs=1e-12)
    assert values[1].grad.tolist() == pytest.approx([0.5 * 0.9 * advantage / 2], abs=1e-12)
