"""Policy losses, token by token, against values worked out by hand."""

import math

import pytest
import torch

from tests.parts.algorithm import loss_inputs
from torchtitan_rl.algorithm import Clip
from torchtitan_rl.algorithm.losses.objectives import Cispo, Reinforce

OLD = -1.0


def at_ratios(ratios: list[float], advantages: list[float], **kwargs):
    """Inputs with log pi_old = -1 and the given token ratios; log pi requires grad."""
    old = torch.full((len(ratios),), OLD, dtype=torch.float64)
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
        (Cispo.Config(cap=2.0), [0.5, 4.0], [1.0, -1.0], [-0.5 * (OLD + math.log(0.5)), 2.0 * (OLD + math.log(4))]),
        # both sides, as verl and slime bound it
        (
            Cispo.Config(cap=1.2, floor=0.8),
            [0.5, 4.0],
            [1.0, -1.0],
            [-0.8 * (OLD + math.log(0.5)), 1.2 * (OLD + math.log(4))],
        ),
        (Reinforce.Config(), [0.5, 4.0], [1.0, -2.0], [-(OLD + math.log(0.5)), 2 * (OLD + math.log(4))]),
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
