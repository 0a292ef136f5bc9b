import math

import pytest
import torch

from tests.unit_tests.trainer.test_packing import COUNTS, episode
from torchtitan_rl.trainer.gate import LogprobGate, LogprobGateError, fill_logprob_diff
from torchtitan_rl.trainer.packing import pack


def test_diff_is_measured_on_completion_tokens_only_and_kept_on_each_episode():
    episodes = [episode(), episode((1,), (2, 3, 4))]
    batch = pack(episodes, [0, 1], normalizers=COUNTS, multiple=8)
    logprobs = batch.sampler_logprobs.clone()  # [T]
    logprobs[0] = 100.0  # a prompt token
    logprobs[2] += 0.5
    logprobs[7] -= 0.25
    assert fill_logprob_diff(batch, logprobs, episodes) == pytest.approx(0.5)
    assert (episodes[0].logprob_diff_mean, episodes[0].logprob_diff_max) == (pytest.approx(0.25), pytest.approx(0.5))
    assert episodes[1].logprob_diff_max == pytest.approx(0.25)


def test_nan_is_the_largest_difference():
    episodes = [episode()]
    batch = pack(episodes, [0], normalizers=COUNTS, multiple=1)
    logprobs = batch.sampler_logprobs + torch.tensor([0, 0, math.nan, 1, 0])
    assert fill_logprob_diff(batch, logprobs, episodes) == math.inf  # survives max() and an all-reduce, as NaN does not
    assert math.isnan(episodes[0].logprob_diff_max)


@pytest.mark.parametrize("diff", [0.2, math.inf, math.nan])
def test_gate_stops_with_the_likely_causes(diff):
    with pytest.raises(
        LogprobGateError, match=r"max_diff 0\.1: .*stale weights.*prefix cache.*temperature.*truncation"
    ):
        LogprobGate.Config(max_diff=0.1).build().check(diff)


def test_gate_passes_within_the_bound_and_when_off():
    LogprobGate.Config(max_diff=0.1).build().check(0.1)
    assert LogprobGate.Config(max_diff=None).build().check(math.inf) is None
