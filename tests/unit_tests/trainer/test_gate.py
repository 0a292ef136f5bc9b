import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.unit_tests.trainer.test_packing import COUNTS, member
from torchtitan_rl.models.score import TokenScores
from torchtitan_rl.state import RunState
from torchtitan_rl.trainer.gate import ComparedTokens, LogprobDiffs, LogprobGate, LogprobGateError
from torchtitan_rl.trainer.logprob_diff import compare_with_sampler
from torchtitan_rl.trainer.packing import pack
from torchtitan_rl.trainer.trainer_config import LogprobGateConfig

pytestmark = pytest.mark.usefixtures("one_rank")


def tokens(values, log_mu=-30.0) -> list[ComparedTokens]:
    """One micro-batch of tokens with these differences; by default the sampler found them most improbable, and no slope shows."""
    return [ComparedTokens(np.asarray(values), np.full(len(values), log_mu), np.zeros(len(values)))]


def sampled_tokens(draw, number=2000, temperature=1.0, scale=4.0, noise=0.0) -> list[ComparedTokens]:
    """One micro-batch sampled at a temperature that the trainer does not know, from normal logits over 64 words."""
    logits = draw.normal(0, scale, (number, 64))  # [tokens, V]
    engine = (logits + noise * draw.normal(size=logits.shape)) / temperature  # [tokens, V]
    log_mu = engine - np.log(np.exp(engine).sum(1, keepdims=True))  # [tokens, V]
    log_pi = logits - np.log(np.exp(logits).sum(1, keepdims=True))  # [tokens, V]
    entropy = -(np.exp(log_pi) * log_pi).sum(1)  # [tokens]
    words = (np.exp(log_mu).cumsum(1) > draw.random((number, 1))).argmax(1)  # [tokens]
    at = np.arange(number), words
    return [ComparedTokens(log_pi[at] - log_mu[at], log_mu[at], log_pi[at] + entropy)]


def gate_in(dtype: str, **config) -> LogprobGate:
    """A gate for a trainer in float32 and an engine in this dtype."""
    return LogprobGate(LogprobGateConfig(**config), dtypes={"float32", dtype})


def compared(batch, logprobs) -> ComparedTokens:
    return compare_with_sampler(batch, TokenScores(logprobs, torch.zeros_like(logprobs)).at(batch.loss_positions))


def test_logprob_diff_is_measured_on_sampled_tokens_and_stored_by_episode():
    members = [member(), member((1,), (2, 3, 4), mask=(True, False, True))]
    batch = pack(members, normalizers=COUNTS, multiple=8)
    logprobs = batch.sampler_logprobs.clone()  # [T]
    logprobs[0] = 100.0  # a prompt token
    logprobs[6] = 100.0  # an environment's token
    logprobs[2] += 0.5
    logprobs[7] -= 0.25
    values, log_mu, surprise = compared(batch, logprobs)
    assert (values.max(), values.min()) == (pytest.approx(0.5), pytest.approx(-0.25))
    assert surprise.tolist() == pytest.approx((values + log_mu).tolist())  # an entropy of 0
    assert log_mu.tolist() == batch.sampler_logprobs[batch.loss_mask > 0].tolist()
    first, second = (m.episode for m in members)
    assert (first.logprob_diff.mean, first.logprob_diff.max) == (pytest.approx(0.25), pytest.approx(0.5))
    assert (second.logprob_diff.mean, second.logprob_diff.max) == (pytest.approx(0.125), pytest.approx(0.25))


def test_tokens_sampled_by_older_weights_are_not_compared():
    stale = member((1,), (2, 3, 4))
    completion = replace(stale.episode.completion, policy_version=3, token_versions=np.array([1, 3, 3], dtype=np.int32))
    stale.episode.scored = replace(stale.episode.scored, completion=completion)
    all_old = member((1,), (2, 3))
    old = replace(all_old.episode.completion, policy_version=3, token_versions=np.array([2, 2], dtype=np.int32))
    all_old.episode.scored = replace(all_old.episode.scored, completion=old)
    batch = pack([member(), stale, all_old], normalizers=COUNTS, multiple=4)
    logprobs = batch.sampler_logprobs.clone()  # [T]
    logprobs[5] += 7.0  # sampled by version 1
    logprobs[6] += 0.5
    logprobs[9:11] += 9.0  # by version 2
    diffs = compared(batch, logprobs).diff
    assert len(diffs) == 4
    assert diffs.max() == pytest.approx(0.5)
    assert stale.episode.logprob_diff.max == pytest.approx(0.5)
    assert stale.episode.logprob_diff.tokens["diff"].tolist() == pytest.approx([7.0, 0.5, 0.0])
    assert (all_old.episode.logprob_diff.mean, all_old.episode.logprob_diff.max) == (0, 0)


def test_nan_counts_as_the_largest_logprob_diff():
    batch = pack([member()], normalizers=COUNTS, multiple=1)
    logprobs = batch.sampler_logprobs + torch.tensor([0, 0, math.nan, 1, 0])
    diffs = LogprobDiffs()
    diffs.add(compared(batch, logprobs).diff)
    assert diffs.largest == math.inf  # survives max() and an all-reduce, as NaN does not
    assert math.isfinite(diffs.total)
    assert math.isnan(batch.members[0].episode.logprob_diff.max)


@pytest.mark.parametrize("diff", [0.2, math.inf, math.nan])
def test_gate_stops_with_the_likely_causes(diff):
    with pytest.raises(LogprobGateError, match=r"max_diff 0\.1: .*stale weights.*prefix cache.*temperature.*kept by"):
        gate_in("float32", max_diff=0.1).check(tokens([diff]))


def test_gate_passes_within_the_bound_and_when_off():
    gate_in("float32", max_diff=0.1, distribution=False).check(tokens([0.1]))
    gate_in("float32").check(tokens([math.inf]))


def test_an_uncertain_prompt_does_not_stop_a_bfloat16_policy_that_has_become_certain():
    gate = gate_in("bfloat16")
    for log_mu in [-1.0] * 5 + [-1e-3] * 20 + [-1.0]:  # SmolLM2's differences are 0.07 to 0.1 times 1 - mu
        gate.check(tokens([0.09 * -math.expm1(log_mu)] * 200, log_mu))
    with pytest.raises(LogprobGateError, match=r"is 51.8, over 10 x the median 0\.08"):
        gate.check(tokens([0.057] * 200, -1e-3))  # as much as the uncertain prompt's, on tokens that are certain


def test_gate_knows_the_steps_before_a_resume():
    gate = gate_in("bfloat16")
    for _ in range(25):
        gate.check(tokens([0.03] * 1000))
    saved = RunState(logprob_gate=gate).state_dict()
    resumed, other = gate_in("bfloat16"), gate_in("float32")
    for one in (resumed, other):
        RunState(logprob_gate=one).load_state_dict(saved)
    with pytest.raises(LogprobGateError, match="10 x the median 0.03 of the 20 steps before"):
        resumed.check(tokens([0.5] * 1000))
    assert resumed.state_dict() == gate.state_dict()
    with pytest.raises(LogprobGateError, match="over 0.001, the largest that is allowed in float32"):
        other.check(tokens([0.5] * 1000))  # what bfloat16 rounds says nothing of it


def float32_gate(generator) -> LogprobGate:
    """A gate after five steps like debug's in float32: mean 4e-7, 99th percentile 1.6e-6."""
    gate = gate_in("float32")
    for _ in range(5):
        gate.check(tokens(generator.exponential(4e-7, size=2500)))
    return gate


@pytest.mark.parametrize(
    ("wrong", "mean"), [("first layer", 9e-5), ("norms", 9e-6), ("one matrix", 1.6e-5), ("one layer in bfloat16", 9e-6)]
)
def test_float32_gate_detects_weights_one_update_behind(wrong, mean):
    generator = np.random.default_rng(0)  # the means are those that debug shows with these weights wrong
    with pytest.raises(LogprobGateError, match="logprob_diff/"):
        float32_gate(generator).check(tokens(generator.exponential(mean, size=2500)))


@pytest.mark.parametrize("number", [1, 10, 100, 400, 2500])
def test_single_outlier_token_does_not_stop_training(number):
    generator = np.random.default_rng(0)
    gate = float32_gate(generator)
    for _ in range(20):
        gate.check(tokens([9e-4, *generator.exponential(4e-7, size=number - 1)]))


def test_differences_below_the_floor_never_stop_training():
    gate = gate_in("float32")
    for rare in (1e-7, 1e-7, 1e-7, 1e-5):
        gate.check(tokens([1e-7] * 980 + [rare] * 20))
    with pytest.raises(LogprobGateError, match="p99 is .*, over 2e-05, the floor in float32"):
        gate.check(tokens([1e-7] * 980 + [3e-5] * 20))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("temperature", "factor"), [(0.7, r"1\.[34]\d"), (0.9, r"1\.1\d"), (1.1, r"0\.9\d")])
def test_another_temperature_is_named_at_step_1(dtype, temperature, factor):
    noise = {"float32": 1e-6, "bfloat16": 0.06}[dtype]
    step = sampled_tokens(np.random.default_rng(0), temperature=temperature, noise=noise)
    with pytest.raises(LogprobGateError, match=f"as if the sampler multiplied the logits by {factor}"):
        gate_in(dtype).check(step)


@pytest.mark.parametrize(
    ("name", "bound", "wrong"),
    [("mean", "1", [0.3] * 800 + [6.0] * 200), ("p75", "0.5", [0.7] * 1000), ("p99", "20", [0.3] * 980 + [30.0] * 20)],
)
def test_bfloat16_has_limits_at_step_1_and_they_do_not_grow_with_the_run(name, bound, wrong):
    gate = gate_in("bfloat16")
    for _ in range(2):
        with pytest.raises(LogprobGateError, match=f"{name} / .*over {bound}, the largest that is allowed in bfloat16"):
            gate.check(tokens(wrong))
        for _ in range(20):
            gate.check(tokens([0.3] * 960 + [3.0] * 40))  # ten times as much is above each limit


def test_an_odd_token_that_all_siblings_share_stops_nothing():
    """Gemma 3 270M: four of 69 tokens had a relative difference of 6.74; with 16 samples of 4 tokens it would be 16 of 256."""
    gate = gate_in("bfloat16")
    for step in range(100):
        odd = [6.74] * 16 if step % 20 == 0 else []
        gate.check(tokens([*odd, *np.random.default_rng(step).exponential(0.09, size=240)]))


def test_no_healthy_bfloat16_step_of_ten_thousand_is_stopped():
    """From an uncertain policy to a certain one, with some steps of few tokens."""
    draw = np.random.default_rng(0)
    gate = gate_in("bfloat16")
    for step in range(10_000):
        gate.check(sampled_tokens(draw, number=(40, 200)[step % 2], scale=4 + 16 * step / 10_000, noise=0.06))
