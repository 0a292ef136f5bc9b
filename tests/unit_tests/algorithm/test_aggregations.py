"""Aggregations against sums done by hand."""

import pytest
import torch

from tests.parts.algorithm import MAX_TOKENS, loss_inputs
from torchtitan_rl.algorithm import SeqMeanTokenMean, SeqSumConst, TokenMean

LOSSES = [1.0, 2.0, 3.0, 10.0]  # a sequence of three tokens and one of one token
IDS = [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (TokenMean.Config(), 16 / 4),
        (SeqMeanTokenMean.Config(), (2 + 10) / 2),
        (SeqSumConst.Config(), 16 / (2 * MAX_TOKENS)),
    ],
)
def test_aggregations_equal_their_closed_form(config, expected):
    inputs = loss_inputs(torch.zeros(4, dtype=torch.float64), advantages=[0.0] * 4, sequence_ids=IDS)
    assert config.build()(torch.tensor(LOSSES, dtype=torch.float64), inputs).item() == pytest.approx(
        expected, abs=1e-14
    )


@pytest.mark.parametrize("config", [TokenMean.Config(), SeqMeanTokenMean.Config(), SeqSumConst.Config()])
def test_tokens_outside_the_mask_do_not_change_the_loss(config):
    inputs = loss_inputs(torch.zeros(4, dtype=torch.float64), advantages=[0.0] * 4, sequence_ids=IDS)
    inputs.mask[2] = 0
    inputs.sequences.num_loss_tokens[0] = 2
    losses = torch.tensor([1.0, 2.0, 1e9, 10.0], dtype=torch.float64)
    expected = {TokenMean: 13 / 4, SeqMeanTokenMean: (1.5 + 10) / 2, SeqSumConst: 13 / (2 * MAX_TOKENS)}
    assert config.build()(losses, inputs).item() == pytest.approx(expected[type(config)._owner], abs=1e-14)
