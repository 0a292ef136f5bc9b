"""Sampler-mismatch corrections: weights from pi_old / mu, no gradient."""

import math

import pytest
import torch

from tests.parts.algorithm import built, episodes_of, group, normalizers_of, pack, spread_logprobs
from torchtitan_rl.algorithm import NoCorrection, SequenceMask, Sequences, SequenceTruncate, TokenMask, TokenTruncate

# Sequence 0 has weights 4, 1 (geometric mean 2); sequence 1 has 0.25, 0.25, 8 (geometric mean 0.5^(1/3) = 0.7937).
WEIGHTS = [4.0, 1.0, 0.25, 0.25, 8.0]
IDS = [0, 0, 1, 1, 1]
G1 = 0.5 ** (1 / 3)


@pytest.mark.parametrize(
    ("config", "expected", "changed"),
    [
        (NoCorrection.Config(), [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]),
        (TokenTruncate.Config(), [2, 1, 0.25, 0.25, 2], [1, 0, 0, 0, 1]),
        (TokenMask.Config(), [4, 1, 0, 0, 0], [0, 0, 1, 1, 1]),
        (SequenceTruncate.Config(cap=1.5), [1.5, 1.5, G1, G1, G1], [1, 1, 0, 0, 0]),
        (SequenceMask.Config(low=0.8), [2, 2, 0, 0, 0], [0, 0, 1, 1, 1]),
        (SequenceMask.Config(), [2, 2, G1, G1, G1], [0, 0, 0, 0, 0]),
    ],
)
def test_mismatch_weights_equal_their_closed_form(config, expected, changed):
    log_weight = torch.tensor(WEIGHTS, dtype=torch.float64).log()
    correction = config.build()(log_weight, Sequences(torch.tensor(IDS), torch.ones(5, dtype=torch.float64), 2))
    assert correction.weight.tolist() == pytest.approx(expected, abs=1e-12)
    assert correction.changed.int().tolist() == changed


def test_mismatch_statistics_are_logged_even_without_a_correction():
    algorithm = built()
    episodes = episodes_of(algorithm, group(0, [1.0, 0.0], logprobs=[(-1.0, -2.0), (-1.0, -1.0)]))
    batch = pack(episodes, normalizers_of(algorithm, episodes))
    values = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in ([-1.5, -2.0], [-1.0, 0.0])]
    logprobs = spread_logprobs(batch, episodes, values)
    metrics = algorithm.loss(batch, logprobs, torch.zeros_like(logprobs)).metrics
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
