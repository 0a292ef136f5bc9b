"""Losses of tokens against values worked out by hand, and against the numbers of peers.

Numbers of a peer were written by its own function, in float64, for the three completions of `three`.
"""

import math

import pytest
import torch

from tests.parts.algorithm import loss_inputs, three
from torchtitan_rl.algorithm import (
    Cispo,
    Clip,
    Dppo,
    Gmpo,
    Gspo,
    OffPolicyMask,
    Reinforce,
    Sapo,
    SeqMeanTokenMean,
    SeqSumConst,
    SquaredLogRatio,
    TargetEntropy,
    TokenMean,
    TopEntropy,
    Vespo,
)

BEFORE = -1.0


def at_ratios(ratios: list[float], advantages: list[float], **kwargs):
    """Inputs with log pi_old = -1 and the given token ratios; log pi requires grad."""
    old = torch.full((len(ratios),), BEFORE, dtype=torch.float64)
    logprobs = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    return loss_inputs(logprobs, old=old, advantages=advantages, **kwargs)


@pytest.mark.parametrize(
    ("config", "ratios", "advantages", "expected"),
    [
        # the specification's worked example: mean -0.6333
        (Clip.Config(), [0.5, 1.0, 1.5], [1.0, -1.0, 2.0], [-0.5, 1.0, -2.4]),
        # A < 0: below 1 - eps the bound holds, above 1 + eps the plain ratio counts
        (Clip.Config(), [0.5, 1.5], [-1.0, -1.0], [0.8, 1.5]),
        # DAPO clips higher: 1.28 * 2
        (Clip.Config(eps_high=0.28), [1.5], [2.0], [-2.56]),
        (Clip.Config(), [1.5, 0.5], [0.0, 0.0], [0.0, 0.0]),
        # dual clip at c = 3 bounds 10 * 2 by 3 * 2, and leaves A > 0 and small ratios alone
        (Clip.Config(dual_clip=3.0), [10.0, 2.0, 10.0], [-2.0, -2.0, 2.0], [6.0, 4.0, -2.4]),
        # -min(rho, cap) A log pi
        (
            Cispo.Config(cap=2.0),
            [0.5, 4.0],
            [1.0, -1.0],
            [-0.5 * (BEFORE + math.log(0.5)), 2.0 * (BEFORE + math.log(4))],
        ),
        # both sides, as verl and slime bound it
        (
            Cispo.Config(cap=1.2, floor=0.8),
            [0.5, 4.0],
            [1.0, -1.0],
            [-0.8 * (BEFORE + math.log(0.5)), 1.2 * (BEFORE + math.log(4))],
        ),
        (Reinforce.Config(), [0.5, 4.0], [1.0, -2.0], [-(BEFORE + math.log(0.5)), 2 * (BEFORE + math.log(4))]),
    ],
)
def test_losses_equal_their_closed_form(config, ratios, advantages, expected):
    losses = config.build()(at_ratios(ratios, advantages))
    assert losses.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("config", "ratio", "advantage", "expected"),
    [
        # d/dlog pi of -rho A is -rho A; of a clipped ratio, 0
        (Clip.Config(), 1.1, 2.0, -2.2),
        (Clip.Config(), 1.5, 2.0, 0.0),
        (Clip.Config(), 1.5, -2.0, 3.0),
        (Clip.Config(), 0.5, -2.0, 0.0),
        (Clip.Config(dual_clip=3.0), 4.0, -2.0, 0.0),
        (Cispo.Config(cap=2.0), 1.5, 2.0, -3.0),
        (Cispo.Config(cap=2.0), 4.0, 2.0, -4.0),
        (Reinforce.Config(), 4.0, 2.0, -2.0),
    ],
)
def test_loss_gradients_equal_their_closed_form(config, ratio, advantage, expected):
    inputs = at_ratios([ratio], [advantage])
    config.build()(inputs).sum().backward()
    assert inputs.logprobs.grad.item() == pytest.approx(expected, abs=1e-12)


def loss_and_gradient(config, aggregation) -> tuple[float, list[float]]:
    inputs = three()
    loss = config.build().terms(inputs, aggregation.Config().build())["policy"]
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    return loss.item(), gradient.tolist()


# fmt: off
PEERS = {
    "verl 0.9.1 dppo_tv": (
        Dppo.Config(), TokenMean, 0.7232683911036633,
        [-0.21982950276, 0, -0.40055546986, -0.120644989071, 0, 0.104989018367, -0.051637077455, -0.028339028961, -0.012112524135],
    ),
    "verl 0.9.1 geo_mean": (
        Gmpo.Config(), SeqMeanTokenMean, -0.3634959616308204,
        [0, -0.12680749897, 0, -0.12680749897, 0, 0.11097676511, *[-0.026073165184] * 3],
    ),
    "TRL 1.16 sapo": (
        Sapo.Config(), SeqMeanTokenMean, -0.8276883036863706,
        [-0.148673861056, -0.1258473926, -0.125767364285, -0.090279197282, 0.060565693189, 0.152287783823, -0.05130044989,
         -0.027428693964, -0.010641440242],
    ),
    "TRL 1.16 vespo": (
        Vespo.Config(), TokenMean, -0.024875164621701282,
        [*[-2.820177e-06] * 4, *[0.053102250856] * 2, *[-0.019856877403] * 3],
    ),
    "TRL 1.16 luspo": (
        Gspo.Config(eps_low=0.2, eps_high=0.2), SeqSumConst, -0.10956217284201995,
        [*[0] * 4, *[0.012551991323] * 2, *[-0.004888718496] * 3],
    ),
    "TRL 1.16 off_policy_mask": (
        OffPolicyMask.Config(delta=0.1), TokenMean, -0.6927336196218643,
        [0, 0, 0, -0.120644989071, 0, 0, -0.051637077455, -0.028339028961, -0.012112524135],
    ),
    "TRL 1.16 top_entropy_quantile": (
        TopEntropy.Config(fraction=0.34), TokenMean, -0.14941485523236814, [0] * 6 + [-0.051637077455, 0, 0],
    ),
}
# fmt: on


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
        [-0.219718391649, 5.5555556e-05, -0.400311025415, -0.120667211294, -0.000133333333, 0.105055685034]
        + [-0.051603744121, -0.028439028961, -0.012401413024],
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
