import math

import pytest
import torch

from tests.unit_tests.trainer.test_packing import COUNTS, member
from torchtitan_rl.trainer.gate import LogprobGate, LogprobGateError, fill_logprob_diff
from torchtitan_rl.trainer.packing import pack


def test_diff_is_measured_on_sampled_tokens_only_and_kept_on_each_episode():
    members = [member(), member((1,), (2, 3, 4), mask=(True, False, True))]
    batch = pack(members, normalizers=COUNTS, multiple=8)
    logprobs = batch.sampler_logprobs.clone()  # [T]
    logprobs[0] = 100.0  # a prompt token
    logprobs[6] = 100.0  # an environment's token
    logprobs[2] += 0.5
    logprobs[7] -= 0.25
    assert fill_logprob_diff(batch, logprobs) == pytest.approx(0.5)
    first, second = (m.episode for m in members)
    assert (first.logprob_diff_mean, first.logprob_diff_max) == (pytest.approx(0.25), pytest.approx(0.5))
    assert (second.logprob_diff_mean, second.logprob_diff_max) == (pytest.approx(0.125), pytest.approx(0.25))


def test_a_micro_batch_of_padding_alone_has_no_difference():
    batch = pack([], normalizers=COUNTS, multiple=8)
    assert fill_logprob_diff(batch, torch.ones(8)) == 0.0


def test_nan_is_the_largest_difference():
    batch = pack([member()], normalizers=COUNTS, multiple=1)
    logprobs = batch.sampler_logprobs + torch.tensor([0, 0, math.nan, 1, 0])
    assert fill_logprob_diff(batch, logprobs) == math.inf  # survives max() and an all-reduce, as NaN does not
    assert math.isnan(batch.members[0].episode.logprob_diff_max)


@pytest.mark.parametrize("diff", [0.2, math.inf, math.nan])
def test_gate_stops_with_the_likely_causes(diff):
    with pytest.raises(
        LogprobGateError, match=r"max_diff 0\.1: .*stale weights.*prefix cache.*temperature.*truncation"
    ):
        LogprobGate.Config(max_diff=0.1).build().check(diff)


def test_gate_passes_within_the_bound_and_when_off():
    LogprobGate.Config(max_diff=0.1).build().check(0.1)
    assert LogprobGate.Config(max_diff=None).build().check(math.inf) is None


def test_an_empty_micro_batch_differs_by_nothing():
    batch = pack([], normalizers=COUNTS, multiple=8)
    assert fill_logprob_diff(batch, batch.sampler_logprobs + 1) == 0
