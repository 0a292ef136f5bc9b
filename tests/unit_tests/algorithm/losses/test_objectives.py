"""Losses and advantages of algorithm/losses/objectives.py and modifiers.py: a peer's own numbers, closed forms, and state.

Numbers of a peer were written by its own function, in float64, for the three completions of `three`.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.parts.algorithm import group, loss_inputs, prompt
from torchtitan_rl.algorithm import KL, Algorithm, Clip, Loss, TokenLoss, TokenMean, Truncation
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.algorithm.losses.distillation import Distill, ExactDistill
from torchtitan_rl.algorithm.losses.maxent import MaxEnt
from torchtitan_rl.algorithm.losses.modifiers import (
    Modifier,
    OffPolicyMask,
    RoleBaseline,
    SquaredLogRatio,
    TargetEntropy,
    TopEntropy,
)
from torchtitan_rl.algorithm.losses.objectives import (
    Dppo,
    EntropyBonus,
    Gdpo,
    Gmpo,
    Gspo,
    MaxRl,
    Reinforce,
    Sapo,
    SeqMeanTokenMean,
    SeqSumConst,
    Vespo,
)
from torchtitan_rl.algorithm.losses.optimal_baseline import LOG_COLLISIONS, LOGPROBS, OptimalBaseline
from torchtitan_rl.algorithm.losses.sft import Nll
from torchtitan_rl.errors import UserError
from torchtitan_rl.trainer.minibatches import Batcher
from torchtitan_rl.types import Group, flat

MODIFIERS = [OffPolicyMask, OptimalBaseline, RoleBaseline, SquaredLogRatio, TargetEntropy, TopEntropy]
OLD = [-1.2, -0.3, -2.5, -0.05, -0.7, -1.6, -0.2, -3.0, -0.9]
CHANGE = [0.5, 0.25, 1.1, -0.1, -0.6, 0.3, 0.15, -0.45, -1.3]
ADVANTAGES = [1.2] * 4 + [-0.7] * 2 + [0.4] * 3
ENTROPY = [0.1, 0.9, 0.5, 0.2, 0.7, 0.3, 0.8, 0.05, 0.6]


def three():
    """Three completions of 4, 2 and 3 tokens; log pi requires grad."""
    old = torch.tensor(OLD, dtype=torch.float64)
    logprobs = (old + torch.tensor(CHANGE, dtype=torch.float64)).requires_grad_()
    inputs = loss_inputs(logprobs, old=old, advantages=ADVANTAGES, sequence_ids=[0] * 4 + [1] * 2 + [2] * 3)
    return replace(inputs, entropy=torch.tensor(ENTROPY, dtype=torch.float64))


def loss_and_gradient(config, aggregation) -> tuple[float, list[float]]:
    inputs = three()
    loss = config.build().terms(inputs, aggregation.Config().build())["policy"]
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    return loss.item(), gradient.tolist()


PEERS = {
    "verl 0.9.1 dppo_tv": (
        Dppo.Config(),
        TokenMean,
        0.7232683911036633,
        [
            -0.21982950276,
            0.0,
            -0.40055546986,
            -0.120644989071,
            0.0,
            0.104989018367,
            -0.051637077455,
            -0.028339028961,
            -0.012112524135,
        ],
    ),
    "verl 0.9.1 geo_mean": (
        Gmpo.Config(),
        SeqMeanTokenMean,
        -0.3634959616308204,
        [
            0.0,
            -0.12680749897,
            0.0,
            -0.12680749897,
            0.0,
            0.11097676511,
            -0.026073165184,
            -0.026073165184,
            -0.026073165184,
        ],
    ),
    "TRL 1.16 GMPOTrainer": (
        Gmpo.Config(),
        SeqMeanTokenMean,
        -0.3634959622674587,
        [
            0.0,
            -0.126807499679,
            0.0,
            -0.126807499679,
            0.0,
            0.110976766192,
            -0.026073165312,
            -0.026073165312,
            -0.026073165312,
        ],
    ),
    "TRL 1.16 sapo": (
        Sapo.Config(),
        SeqMeanTokenMean,
        -0.8276883036863706,
        [
            -0.148673861056,
            -0.1258473926,
            -0.125767364285,
            -0.090279197282,
            0.060565693189,
            0.152287783823,
            -0.05130044989,
            -0.027428693964,
            -0.010641440242,
        ],
    ),
    "TRL 1.16 vespo": (
        Vespo.Config(),
        TokenMean,
        -0.024875164621701282,
        [
            -2.820177e-06,
            -2.820177e-06,
            -2.820177e-06,
            -2.820177e-06,
            0.053102250856,
            0.053102250856,
            -0.019856877403,
            -0.019856877403,
            -0.019856877403,
        ],
    ),
    "TRL 1.16 luspo": (
        Gspo.Config(eps_low=0.2, eps_high=0.2),
        SeqSumConst,
        -0.10956217284201995,
        [0.0, 0.0, 0.0, 0.0, 0.012551991323, 0.012551991323, -0.004888718496, -0.004888718496, -0.004888718496],
    ),
    "TRL 1.16 off_policy_mask": (
        OffPolicyMask.Config(delta=0.1),
        TokenMean,
        -0.6927336196218643,
        [0.0, 0.0, 0.0, -0.120644989071, 0.0, 0.0, -0.051637077455, -0.028339028961, -0.012112524135],
    ),
    "TRL 1.16 top_entropy_quantile": (
        TopEntropy.Config(fraction=0.34),
        TokenMean,
        -0.14941485523236814,
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -0.051637077455, 0.0, 0.0],
    ),
}


@pytest.mark.parametrize("name", PEERS)
def test_loss_and_gradient_equal_the_numbers_of_a_peer(name):
    config, aggregation, loss, gradient = PEERS[name]
    found = loss_and_gradient(config, aggregation)
    assert found[0] == pytest.approx(loss, rel=1e-8)
    assert found[1] == pytest.approx(gradient, abs=2e-9)


def test_dppo_with_the_squared_log_ratio_has_the_gradient_of_prime_rl():
    # prime-rl (559b447) differentiates the ratio, where the weight is a constant here: the same gradient.
    _, gradient = loss_and_gradient(SquaredLogRatio.Config(loss=Dppo.Config()), TokenMean)
    assert gradient == pytest.approx(
        [
            -0.219718391649,
            5.5555556e-05,
            -0.400311025415,
            -0.120667211294,
            -0.000133333333,
            0.105055685034,
            -0.051603744121,
            -0.028439028961,
            -0.012401413024,
        ],
        abs=1e-11,
    )


LOSSES = [
    Gmpo.Config(),
    Dppo.Config(),
    Sapo.Config(tau_neg=1.0),
    Vespo.Config(),
    SquaredLogRatio.Config(loss=Reinforce.Config()),
    OffPolicyMask.Config(),
    TopEntropy.Config(fraction=1.0),
    TargetEntropy.Config(),
]


@pytest.mark.parametrize("config", LOSSES, ids=lambda config: type(config)._owner.__name__)
def test_first_update_equals_the_policy_gradient(config):
    logprobs = torch.tensor([-0.3, -2.0, -1.0], dtype=torch.float64, requires_grad=True)
    inputs = loss_inputs(logprobs, advantages=[2.0, -1.0, 0.5], sequence_ids=[0, 1, 2])
    config.build()(inputs).sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-2.0, 1.0, -0.5], abs=1e-12)


def advantages(config, *rewards, breakdowns=None):
    """The advantages of groups with these rewards; `breakdowns` [group][sample]."""
    columns = [{"breakdown": of_group} for of_group in breakdowns or []] or [{}] * len(rewards)
    groups = draft_episodes([group(i, r, **c) for i, (r, c) in enumerate(zip(rewards, columns, strict=True))])
    for episode in flat(groups):
        episode.credit.shaped_reward = episode.reward
    return config.build().of_step([list(of_group) for of_group in rewards], groups)


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


def test_maxrl_has_the_expected_gradient_of_the_first_terms_of_log_p():
    # log p = -sum_k (1 - p)^k / k; the derivative of its first G - 1 terms is sum_(k < G - 1) (1 - p)^k.
    p, size = 0.3, 4
    found = 0.0
    for outcome in range(2**size):
        rewards = [float(outcome >> i & 1) for i in range(size)]
        probability = math.prod(p if reward else 1 - p for reward in rewards)
        scores = [1 - p if reward else -p for reward in rewards]  # d log p(answer) / d logit
        of_group = advantages(MaxRl.Config(), rewards)[0]
        found += probability * sum(a * score for a, score in zip(of_group, scores, strict=True)) / size
    assert found == pytest.approx(sum((1 - p) ** k for k in range(size - 1)) * p * (1 - p), rel=1e-12)


def test_gdpo_tells_apart_what_the_sum_does_not():
    breakdowns = [[{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 0.0}]]
    found = advantages(Gdpo.Config(), [1.0, 1.0, 1.0], breakdowns=breakdowns)[0]
    assert found == pytest.approx([0.0, 0.0, 0.0], abs=1e-9)  # the two functions are exact opposites
    weighted = advantages(Gdpo.Config(weights={"b": 0.5}), [1.0, 0.5, 1.0], breakdowns=breakdowns)[0]
    assert weighted[0] > 0 > weighted[1]


def test_gdpo_equals_trl_normalize_then_sum():
    scores = [(1.0, 0.0), (0.0, 0.5), (1.0, 1.0), (1.0, 0.25), (0.0, 0.25), (0.0, 0.75)]
    breakdowns = [[{"a": a, "b": b} for a, b in scores[:3]], [{"a": a, "b": b} for a, b in scores[3:]]]
    rewards = [[a + 0.5 * b for a, b in scores[:3]], [a + 0.5 * b for a, b in scores[3:]]]
    found = advantages(Gdpo.Config(weights={"b": 0.5}), *rewards, breakdowns=breakdowns)
    assert sum(found, []) == pytest.approx(
        [0.08648582418, -1.29085442204, 1.20436859786, 0.96819669281, -0.96808494025, -0.00011175256], abs=1e-9
    )


def test_gdpo_refuses_turns_and_dropped_groups():
    for wrong in ({"credit": "turn"}, {"zero_variance": "drop"}):
        with pytest.raises(UserError, match=f"algorithm.{next(iter(wrong))} = .* with Gdpo"):
            Algorithm.Config(advantage=Gdpo.Config(), **wrong)


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
    with pytest.raises(UserError, match="algorithm.credit = 'turn': expected episode with EntropyBonus"):
        Algorithm.Config(advantage=EntropyBonus.Config(), credit="turn")


@pytest.mark.parametrize("advantage", [Gdpo.Config(), MaxRl.Config(lowest=-9.0)])
def test_kl_in_the_reward_is_refused_where_it_has_no_bound_or_no_size(advantage):
    name = type(advantage)._owner.__name__
    with pytest.raises(UserError, match=f"algorithm.kl.placement = 'reward': expected \"loss\" with {name}"):
        Algorithm.Config(advantage=advantage, kl=KL.Config(coef=0.1, placement="reward"))
    Algorithm.Config(advantage=advantage, kl=KL.Config(coef=0.1))


def test_gdpo_refuses_a_cut_reward_whose_size_has_no_effect():
    with pytest.raises(UserError, match="algorithm.truncation.cut_reward = -0.001: expected 0 with Gdpo"):
        Algorithm.Config(advantage=Gdpo.Config(), truncation=Truncation.Config(cut_reward=-1e-3))


def test_maxrl_refuses_a_truncation_whose_penalty_is_below_its_lowest():
    penalty = Truncation.Config(mode="penalty", cut_reward=-0.5)
    with pytest.raises(UserError, match="algorithm.advantage.lowest = 0.0: expected at most -1.5"):
        Algorithm.Config(advantage=MaxRl.Config(), truncation=penalty)
    Algorithm.Config(advantage=MaxRl.Config(lowest=-1.5), truncation=penalty)


def test_top_entropy_has_its_threshold_of_tokens_without_an_advantage_too():
    algorithm = Algorithm.Config(loss=OffPolicyMask.Config(loss=TopEntropy.Config())).build(max_completion_tokens=9)
    groups = draft_episodes([group(0, [1.0, 0.0]), group(1, [1.0, 1.0])])
    algorithm.credit.assign(groups)
    batcher = Batcher(
        algorithm, max_tokens=99, multiple=1, attention_cost=0.0, share_prompts=False, num_ranks=1, rank=0
    )
    made = batcher.minibatch(groups)
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
    assert {k: m.value for k, m in loss.group_metrics([]).items()} == {
        "role_baseline/first": 0.75,
        "role_baseline/second": -0.5,
    }
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
    assert not loss.uses_advantages
    inputs = three()
    assert set(loss.clipped(inputs, loss.ratio(inputs))) == {"low", "high"}
    assert "off_policy/masked_fraction" in loss.loss_metrics(inputs)
    expected = Dppo.Config().build()(inputs) + 0.1 * inputs.log_ratio.square()
    masked = OffPolicyMask.Config().build().masked(inputs)
    assert torch.equal(loss(inputs), torch.where(masked, 0.0, expected))


@pytest.mark.parametrize("modifier", MODIFIERS, ids=lambda modifier: modifier.__name__)
def test_modifier_hands_on_all_that_a_loss_is_asked_for(modifier):
    asked_for = {*vars(Loss), *vars(TokenLoss)} - {"terms", "zero_without_advantage", "Config", "__init__"}
    handed_on = {*vars(modifier.Config().build())}
    for cls in modifier.mro():
        if issubclass(cls, Modifier):
            handed_on |= {*vars(cls)}
    assert not {name for name in asked_for - handed_on if not name.startswith("_")}


def test_modifier_of_demonstrations_or_an_exact_teacher_learns_from_the_same():
    demonstrated = Algorithm.Config(loss=TopEntropy.Config(loss=Nll.Config())).build(max_completion_tokens=9)
    assert not demonstrated.policy_loss.from_engine
    assert demonstrated.policy_loss.ratio_loss is None
    taught = Algorithm.Config(loss=TargetEntropy.Config(loss=ExactDistill.Config(beta=0.5)))
    assert taught.build(max_completion_tokens=9).policy_loss.divergence_beta == 0.5


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        *((modifier, TargetEntropy.Config(), "without terms beside its tokens'") for modifier in MODIFIERS),
        (TopEntropy, MaxEnt.Config(), "without terms beside its tokens'"),
        (SquaredLogRatio, Nll.Config(), "from_engine"),
        (OffPolicyMask, Distill.Config(rewards=True), "uses_rewards"),
        (RoleBaseline, OptimalBaseline.Config(), "uses_advantages"),
        (OptimalBaseline, Distill.Config(), "uses_advantages"),
    ],
)
def test_loss_that_a_modifier_would_rob_is_refused_by_name(outer, inner, expected):
    own, other = outer.__name__, type(inner)._owner.__name__
    with pytest.raises(UserError, match=rf"{own}.loss = {other}.*{expected}"):
        Algorithm.Config(loss=outer.Config(loss=inner))
    deeper = SquaredLogRatio.Config(loss=outer.Config(loss=inner))
    with pytest.raises(UserError, match=rf"{own}.loss = {other}.*{expected}"):
        Algorithm.Config(loss=deeper)


def test_target_entropy_around_a_mask_has_its_bonus():
    config = TargetEntropy.Config(loss=OffPolicyMask.Config(loss=Sapo.Config(), delta=0.1), step=0.75)
    loss = Algorithm.Config(loss=config).build(max_completion_tokens=9).policy_loss
    loss.after_update({"policy/entropy": 0.1})
    masked = loss_of(OffPolicyMask.Config(loss=Sapo.Config(), delta=0.1)).item()
    found = loss.terms(three(), TokenMean.Config().build())["policy"].item()
    assert found == pytest.approx(masked - 0.75 * np.mean(ENTROPY), rel=1e-12)


def test_baseline_modifiers_refuse_settings_without_effect():
    for wrong in ({"advantage": MaxRl.Config()}, {"credit": "turn"}, {"zero_variance": "refill"}):
        with pytest.raises(UserError, match=f"algorithm.{next(iter(wrong))} = "):
            Algorithm.Config(loss=OptimalBaseline.Config(), **wrong)
    with pytest.raises(UserError, match="algorithm.entropy_coef = 0.1: expected 0"):
        Algorithm.Config(loss=TargetEntropy.Config(), entropy_coef=0.1)


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
