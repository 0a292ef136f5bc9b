"""`Trainer` on a tiny random Qwen3 in one process: what an update, a score and a checkpoint see."""

import importlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

from tests.parts.tiny import save_tiny_checkpoint, tiny_spec
from tests.parts.tiny_trainer import MAX_TOKENS, credited, scored_step, tiny_trainer, weights
from torchtitan_rl.algorithm import KL, Algorithm, TargetEntropy
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.observe.metrics.throughput import TokenFlops
from torchtitan_rl.run.checkpointer import policy_state
from torchtitan_rl.trainer import minibatches
from torchtitan_rl.trainer.gate import LogprobGateError
from torchtitan_rl.trainer.teachers.frozen_models import Reference
from torchtitan_rl.trainer.trainer import Trainer
from torchtitan_rl.types import Completion, Group, ScoredCompletion, flat

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def folder(one_rank, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_checkpoint(path)
    return str(path)


@pytest.fixture
def build(folder):
    return partial(tiny_trainer, folder)


def test_checkpoint_after_a_probe_has_the_sharded_master_weights(build):
    trainer = build(mixed_precision_param="bfloat16")
    trainer.token_logprobs(np.arange(1, 9))
    state = policy_state(trainer.model)
    assert {name: t.dtype for name, t in state.items()} == dict.fromkeys(state, torch.float32)
    assert all(isinstance(t, DTensor) for t in state.values())


def test_a_completion_without_sampled_tokens_needs_no_reference(build):
    trainer = build(Algorithm.Config(kl=KL.Config(coef=0.1)))
    groups = scored_step(num_prompts=2)
    prompt, samples = groups[0].prompt, list(groups[0].samples)
    for place, (tokens, mask) in enumerate([([], []), ([5, 6], [False, False])]):
        completion = Completion(
            sample_idx=place, policy_version=0, token_ids=tokens, sampler_logprobs=[0.0] * len(tokens), loss_mask=mask, text="",
            finish_reason="stop",
        )  # fmt: skip
        samples[place] = ScoredCompletion(completion=completion, reward=1.0)
    episodes = draft_episodes([Group(prompt=prompt, samples=samples), groups[1]])
    Reference(trainer).add_logprobs(episodes)
    assert [len(e.reference_logprobs) for e in flat(episodes)] == [len(e.completion.token_ids) for e in flat(episodes)]
    trainer.algorithm.credit.assign(episodes)
    assert [e.credit.left_out for e in episodes[0].samples] == ["no tokens", "no tokens", None, None]
    assert trainer.update(episodes).optimizer_steps == 1


def test_step_without_signal_leaves_weights_unchanged(build):
    trainer = build(Algorithm.Config(zero_variance="drop"), num_minibatches=2)
    trainer.update(credited(trainer))
    before = weights(trainer)
    groups = credited(trainer)
    for episode in flat(groups):
        episode.credit.left_out = "no reward"
    report = trainer.update(groups)
    assert torch.equal(weights(trainer), before)
    assert (report.optimizer_steps, report.trained_tokens) == (0, 0)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_samples_of_another_policy_stop_the_update_before_its_first_step(build, minibatches):
    trainer = build(num_minibatches=minibatches, generator_dtype="float32")
    before = weights(trainer)
    with pytest.raises(LogprobGateError):
        trainer.update(credited(trainer))  # its log-probabilities are made up
    assert torch.equal(weights(trainer), before)


@pytest.mark.parametrize("epochs", [1, 2])
def test_completions_with_advantage_zero_skip_the_backward(build, monkeypatch, epochs):
    """The same update, metrics and differences as with a backward over all of them."""
    split, whole = build(num_epochs=epochs), build(num_epochs=epochs)
    monkeypatch.setattr(whole.algorithm, "zero_gradient", lambda episode: False)
    steps = [credited(trainer) for trainer in (split, whole)]
    reports = [trainer.update(groups) for trainer, groups in zip((split, whole), steps, strict=True)]
    assert reports[0].forward_only_tokens > 0 == reports[1].forward_only_tokens
    assert reports[0].rank_tokens >= reports[1].rank_tokens  # a prompt is shared within a micro-batch
    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=1e-5)
    torch.testing.assert_close(weights(split), weights(whole), rtol=1.2e-7, atol=1e-9)  # a float32's last digit
    for ours, theirs in zip(*map(flat, steps), strict=True):
        np.testing.assert_allclose(ours.logprob_diff.tokens["diff"], theirs.logprob_diff.tokens["diff"], atol=1e-5)
    sums = [
        sum(m["policy/entropy"].value * m["policy/entropy"].weight for m in report.metrics if "policy/entropy" in m)
        for report in reports
    ]
    assert sums[0] == pytest.approx(sums[1], rel=1e-5)
    if epochs == 1:  # the loss's forward, which has the entropy, is of the policy that sampled
        kept = sum(e.logprob_diff.tokens["entropy"].sum() for e in flat(steps[0]) if e.in_loss)
        assert kept == pytest.approx(sums[0], rel=1e-5)


@pytest.mark.parametrize("epochs", [1, 2])
def test_completions_without_a_gradient_are_drawn_for_the_checks(build, monkeypatch, epochs):
    """The same weights and loss bit for bit as with all of them, and means that stand for all tokens."""
    monkeypatch.setattr(minibatches, "LEAST_TOKENS", 1)
    monkeypatch.setattr(minibatches, "ONE_IN", 4)
    some, whole = build(num_epochs=epochs), build(num_epochs=epochs, score_all=True)
    steps = [credited(trainer) for trainer in (some, whole)]
    reports = [trainer.update(groups) for trainer, groups in zip((some, whole), steps, strict=True)]
    assert torch.equal(weights(some), weights(whole))
    assert reports[0].grad_norm == reports[1].grad_norm
    assert reports[0].trained_tokens + reports[0].unscored_tokens == reports[1].trained_tokens
    for key in ("loss/total", "policy/entropy"):
        merged = [[m[key] for m in report.metrics if key in m] for report in reports]
        values = [np.average([m.value for m in ms], weights=[m.weight for m in ms]) for ms in merged]
        assert sum(m.weight for m in merged[0]) == sum(m.weight for m in merged[1])
        assert values[0] == (values[1] if key == "loss/total" else pytest.approx(values[1], rel=0.05))
    scored = [e.logprob_diff is not None for e in flat(steps[0]) if not e.credit.has_advantage]
    assert (sum(scored), len(scored)) == (2, 6)


def test_what_a_controller_reads_is_scored(build, monkeypatch):
    monkeypatch.setattr(minibatches, "LEAST_TOKENS", 1)
    trainer = build(Algorithm.Config(loss=TargetEntropy.Config()))
    report = trainer.update(credited(trainer))
    assert report.unscored_tokens == 0 < report.forward_only_tokens


def test_a_small_step_is_scored_whole_and_a_large_one_by_chance():
    groups = [Group(prompt=group.prompt, samples=group.samples) for group in scored_step(num_prompts=200)]
    items = minibatches.items_of(draft_episodes(groups), whole_groups=False)
    assert minibatches.draw(items[:40], known=0) == items[:40]  # 250 tokens
    drawn = minibatches.draw(items, known=0)
    assert sum(len(i[0].episode.completion.sampled_logprobs) for i in drawn) in range(512, 512 + MAX_TOKENS)
    assert len(minibatches.draw(items, known=512)) == len(items) / 16
    assert drawn == minibatches.draw(items, known=0) != items[: len(drawn)]


def test_controllers_get_the_mean_over_all_micro_batches(build, monkeypatch):
    trainer, given = build(Algorithm.Config(loss=TargetEntropy.Config())), []
    monkeypatch.setattr(trainer.algorithm, "after_update", lambda means: given.append(means) or {})
    metrics = [m["policy/entropy"] for m in trainer.update(credited(trainer)).metrics if "policy/entropy" in m]
    assert len(metrics) > 1
    mean = np.average([m.value for m in metrics], weights=[m.weight for m in metrics])
    assert given == [{"policy/entropy": pytest.approx(mean)}]


def test_the_documented_muon_trains_and_resumes(build, tmp_path, monkeypatch):
    """examples/muon.py: matrices by torch.optim.Muon, whose state has no step and one moment."""
    monkeypatch.syspath_prepend(EXAMPLES)
    muon = importlib.import_module("muon").MuonAndAdamW.Config(lr=1e-2)
    trainer, other = build(optimizer=muon), build(optimizer=muon)
    trainer.after_load()
    for group in trainer.param_groups():
        group["lr"] = 1e-2  # without the warm-up
    for _ in range(2):
        before = weights(trainer)
        trainer.update(credited(trainer))
        assert not torch.equal(weights(trainer), before)
    saved = {"optimizer": trainer.optimizer, **policy_state(trainer.model)}
    dcp.save(saved, checkpoint_id=tmp_path / "saved")
    dcp.load({"optimizer": other.optimizer, **policy_state(other.model)}, checkpoint_id=tmp_path / "saved")
    for one in (trainer, other):
        one.after_load()
        for group in one.param_groups():
            group["lr"] = 1e-2  # the schedules are at other steps
        one.update(credited(one))
    assert torch.equal(weights(trainer), weights(other))


def test_resumed_optimizer_uses_the_new_settings(build):
    trainer = build()
    [group] = trainer.optimizer.optimizers[0].param_groups
    own = {key: value for key, value in group.items() if key != "params"}
    group.update(lr=9.0, weight_decay=9.0, betas=(0.0, 0.0), eps=9.0)  # as a checkpoint of another run leaves them
    trainer.after_load()
    assert {key: value for key, value in group.items() if key != "params"} == own


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("algorithm", [Algorithm.Config(), Algorithm.Config(entropy_coef=0.01)])
def test_reported_flops_bound_those_counted_by_torch(build, algorithm, share_prompts):
    trainer = build(algorithm)
    trainer.batcher.share_prompts = share_prompts
    groups = credited(trainer)
    with FlopCounterMode(display=False) as counter:
        report = trainer.update(groups)
    least = TokenFlops.of(tiny_spec().model, trainer.model).total(report.work)
    assert 0.5 * counter.get_total_flops() < least < counter.get_total_flops()
    assert report.packed_tokens - report.padding_tokens == sum(report.rank_tokens)
    if not share_prompts:
        assert least == pytest.approx(sum(map(partial(work_of, trainer), groups)), rel=1e-12)


def test_update_with_flex_attention_is_the_same_in_fewer_micro_batches(build, eager_flex):
    trainers = [build(attention=attention, max_tokens_per_microbatch=64) for attention in ("auto", "flex")]
    reports = [trainer.update(credited(trainer)) for trainer in trainers]
    assert reports[1].trained_tokens < reports[0].trained_tokens
    assert reports[1].grad_norm == pytest.approx(reports[0].grad_norm, rel=1e-5)
    torch.testing.assert_close(*map(weights, trainers), atol=1e-6, rtol=1e-4)


def work_of(trainer: Trainer, group) -> float:
    """6 operations for each weight that a token meets: all of the layers', the head's where it is scored."""
    layers = [p for name, p in trainer.model.named_parameters() if name.startswith(("layers", "norm"))]
    pair = 6 * 4 * 32 * 2 * 2  # layers, heads x size, two products
    total = 0.0
    for episode in group.samples:
        length = len(group.prompt.token_ids) + len(episode.completion.token_ids)
        work = 6 * sum(p.numel() for p in layers) * length + pair * length * (length + 1) / 2
        work += 6 * trainer.model.lm_head.weight.numel() * episode.completion.num_sampled
        total += work / 3 if trainer.algorithm.zero_gradient(episode) else work
    return total
