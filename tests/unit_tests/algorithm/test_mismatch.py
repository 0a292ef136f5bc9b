"""What is logged of the mismatch with the sampler. tests/unit_tests/test_dense_update.py has the corrections."""

import math

import pytest
import torch

from tests.parts.algorithm import built, episodes_of, group, normalizers_of, pack, spread_logprobs


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
