"""Losses made of another loss: what they change, what they hand on, and which nestings are refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.parts.algorithm import ENTROPY, OLD, group, prompt, three
from torchtitan_rl.algorithm import (
    Algorithm,
    Clip,
    Distill,
    Dppo,
    ExactDistill,
    Loss,
    MaxEnt,
    Nll,
    OffPolicyMask,
    OptimalBaseline,
    RoleBaseline,
    SquaredLogRatio,
    TargetEntropy,
    TokenMean,
    TopEntropy,
)
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.algorithm.losses.modifier import Modifier
from torchtitan_rl.algorithm.losses.optimal_baseline import LOG_COLLISIONS, LOGPROBS
from torchtitan_rl.errors import UserError
from torchtitan_rl.trainer.minibatches import Batcher
from torchtitan_rl.types import Group, flat

MODIFIERS = [OffPolicyMask, OptimalBaseline, RoleBaseline, SquaredLogRatio, TargetEntropy, TopEntropy]


def test_top_entropy_has_its_threshold_of_tokens_without_an_advantage_too():
    algorithm = Algorithm.Config(loss=OffPolicyMask.Config(loss=TopEntropy.Config())).build(max_completion_tokens=9)
    groups = draft_episodes([group(0, [1.0, 0.0]), group(1, [1.0, 1.0])])
    algorithm.credit.assign(groups)
    made = Batcher(algorithm=algorithm, max_tokens=99).minibatch(groups)
    assert (made.num_forward_only, [len(batch.members) for batch in made.batches]) == (0, [4])


def roles(rewards: list[float], role: str = "first"):
    groups = draft_episodes([group(0, rewards)])
    (only,) = groups
    only = Group(prompt=replace(prompt(0), columns={"role": role}), samples=only.samples)
    for episode in only.samples:
        episode.credit.shaped_reward = episode.reward
    return only


def test_role_baseline_scores_a_reward_before_it_moves_its_own_role_and_resumes():
    loss = RoleBaseline.Config(decay=0.5).build()
    first, second = roles([1.0, 1.0]), roles([-1.0, None], "second")
    loss.assign_credit([first, second])
    assert [episode.credit.advantage for episode in first.samples] == [1.0, 0.5]
    assert [episode.credit.advantage for episode in second.samples] == [-1.0, 0.0]
    means = {key: metric.value for key, metric in loss.group_metrics([]).items()}
    assert means == {"role_baseline/first": 0.75, "role_baseline/second": -0.5}
    resumed = RoleBaseline.Config(decay=0.5).build()
    resumed.load_state_dict(loss.state_dict())
    resumed.assign_credit([again := roles([1.0])])
    assert again.samples[0].credit.advantage == 0.25


def test_target_entropy_raises_the_bonus_below_the_target_and_withdraws_it_above():
    loss = TargetEntropy.Config(target=0.5, step=0.25, most=0.5).build()
    assert loss.terms(three(), TokenMean.Config().build())["policy"] == loss_of(Clip.Config())
    for entropy, coef, active in ((0.4, 0.25, True), (0.4, 0.5, True), (0.4, 0.5, True), (0.6, 0.25, False)):
        loss.after_update({"policy/entropy": entropy})
        assert (loss.coef, loss.active) == (coef, active)
    loss.after_update({"policy/entropy": 0.1})
    inputs = three()
    inputs.entropy.requires_grad_()
    total = loss.terms(inputs, TokenMean.Config().build())["policy"]
    assert total.item() == pytest.approx(loss_of(Clip.Config()).item() - 0.5 * np.mean(ENTROPY), rel=1e-12)
    (gradient,) = torch.autograd.grad(total, inputs.entropy)
    assert gradient.tolist() == pytest.approx([-0.5 / 9] * 9)
    resumed = TargetEntropy.Config().build()
    resumed.load_state_dict(loss.state_dict())
    assert (resumed.coef, resumed.active) == (loss.coef, loss.active)


def loss_of(config):
    return config.build().terms(three(), TokenMean.Config().build())["policy"].detach()


def test_modifiers_nest_and_forward_what_the_inner_loss_declares():
    config = RoleBaseline.Config(loss=OffPolicyMask.Config(loss=SquaredLogRatio.Config(loss=Dppo.Config(), coef=0.1)))
    loss = config.build()
    assert loss.learns_from == "rewards"
    inputs = three()
    losses = loss(inputs)
    assert set(inputs.report.clipped) == {"low", "high"}
    assert set(inputs.report.metrics) == {"off_policy/masked_fraction"}
    expected = Dppo.Config().build()(inputs) + 0.1 * inputs.log_ratio.square()
    masked = OffPolicyMask.Config().build().masked(inputs)
    assert torch.equal(losses, torch.where(masked, 0.0, expected))


@pytest.mark.parametrize("modifier", MODIFIERS, ids=lambda modifier: modifier.__name__)
def test_modifier_hands_on_all_that_a_loss_is_asked_for(modifier):
    asked_for = {name for name, value in vars(Loss).items() if not name.startswith("_") and type(value) is not property}
    handed_on = {*vars(modifier.Config().build())}
    for cls in modifier.mro():
        if issubclass(cls, Modifier):
            handed_on |= {*vars(cls)}
    assert asked_for - handed_on <= {"terms"}


def test_modifier_of_demonstrations_or_an_exact_teacher_learns_from_the_same():
    demonstrated = Algorithm.Config(loss=TopEntropy.Config(loss=Nll.Config())).build(max_completion_tokens=9)
    assert not demonstrated.policy_loss.from_engine
    taught = Algorithm.Config(loss=TargetEntropy.Config(loss=ExactDistill.Config(beta=0.5)))
    assert taught.build(max_completion_tokens=9).policy_loss.divergence_beta == 0.5


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        *((modifier, TargetEntropy.Config(), "without terms beside its tokens'") for modifier in MODIFIERS),
        (TopEntropy, MaxEnt.Config(), "without terms beside its tokens'"),
        (SquaredLogRatio, Nll.Config(), "advantages or rewards or samples"),
        (OffPolicyMask, Distill.Config(), "advantages or rewards"),
        (RoleBaseline, OptimalBaseline.Config(), "advantages"),
        (OptimalBaseline, Distill.Config(), "advantages"),
    ],
)
def test_loss_that_a_modifier_would_rob_is_refused_by_name(outer, inner, expected):
    own, other = outer.__name__, type(inner)._owner.__name__
    with pytest.raises(UserError, match=rf"{own}.loss = {other}.*{expected}"):
        Algorithm.Config(loss=outer.Config(loss=inner))
    deeper = SquaredLogRatio.Config(loss=outer.Config(loss=inner))
    with pytest.raises(UserError, match=rf"{own}.loss = {other}.*{expected}"):
        Algorithm.Config(loss=deeper)


def test_optimal_baseline_equals_verl():
    logprobs = [tuple(OLD[:4]), tuple(OLD[4:6]), tuple(OLD[6:])]
    collisions = [[0.3, 0.6, 0.2, 0.9], [0.5, 0.35], [0.7, 0.1, 0.4]]
    groups = draft_episodes([group(0, [1.0, 0.0, 0.5], logprobs=logprobs)])
    for episode, squares in zip(flat(groups), collisions, strict=True):
        columns = {LOGPROBS: episode.completion.sampler_logprobs, LOG_COLLISIONS: np.log(squares)}
        episode.credit.token_columns |= columns
        episode.credit.shaped_reward = episode.reward
    OptimalBaseline.Config().build().assign_credit(groups)
    found = np.concatenate([episode.credit.token_advantages for episode in flat(groups)])
    assert found.tolist() == pytest.approx(
        [0.42470984, 0.595598116, 0.235579569, 1.0, -0.57529016, -0.404401884, -0.07529016, 0.095598116, -0.264420431],
        abs=1e-6,
    )


def test_optimal_baseline_of_certain_tokens_is_no_rounding_error():
    groups = draft_episodes([group(0, [1.0, 0.0], logprobs=[(0.0, -1.0)] * 2)])
    for episode, rounding in zip(flat(groups), (1e-7, -1e-7), strict=True):
        columns = {LOGPROBS: episode.completion.sampler_logprobs, LOG_COLLISIONS: np.array([rounding, -0.5])}
        episode.credit.token_columns |= columns
        episode.credit.shaped_reward = episode.reward
    OptimalBaseline.Config().build().assign_credit(groups)
    assert all(np.abs(episode.credit.token_advantages).max() <= 1 for episode in flat(groups))


class Compared(Modifier):
    reads, controller_inputs, whole_groups = ("mine",), ("policy/entropy",), True


def test_a_modifiers_own_fields_are_added_to_those_of_its_loss():
    loss = Compared.Config(loss=OptimalBaseline.Config()).build()
    assert loss.reads == (LOGPROBS, LOG_COLLISIONS, "mine")
    assert (loss.controller_inputs, loss.whole_groups) == (("policy/entropy",), True)
    assert (loss.learns_from, loss.zero_without_advantage) == ("rewards", False)
