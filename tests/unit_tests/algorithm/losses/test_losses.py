"""Losses of tokens against the numbers of peers. tests/unit_tests/test_dense_update.py compares them with dense float64 formulas.

Numbers of a peer were written by its own function, in float64, for the three completions of `three`.
"""

from dataclasses import replace

import pytest
import torch

from tests.parts.algorithm import three
from torchtitan_rl.algorithm import (
    Dppo,
    Gmpo,
    Gspo,
    OffPolicyMask,
    Sapo,
    SeqMeanTokenMean,
    SeqSumConst,
    TokenMean,
    TopEntropy,
    Vespo,
)


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


def test_threshold_of_top_entropy_is_that_of_the_tokens_in_the_loss():
    inputs = three()
    mask = torch.tensor([1.0] * 6 + [0.0] * 3, dtype=torch.float64)  # the rest is padding, with entropy 0
    losses = TopEntropy.Config(fraction=0.34).build()(replace(inputs, mask=mask, entropy=inputs.entropy * mask))
    assert losses.nonzero().flatten().tolist() == [1, 4]
