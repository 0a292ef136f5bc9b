"""Rollouts of several traces: a rollout that is cut into traces has the gradient of the whole one, and what is packed is exact."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from torchtitan_rl.algorithm import (
    Algorithm,
    Cispo,
    Clip,
    Gspo,
    MaxEnt,
    Reinforce,
    SeqMeanTokenMean,
    SeqSumConst,
    SequenceMask,
    SequenceTruncate,
    TokenMask,
    TokenMean,
    TokenTruncate,
)
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.algorithm.kl import KL
from torchtitan_rl.algorithm.mismatch import NoCorrection
from torchtitan_rl.device import DEVICE_TYPE
from torchtitan_rl.models.score import TokenScores
from torchtitan_rl.trainer.logprob_diff import compare_with_sampler
from torchtitan_rl.trainer.minibatches import items_of, num_tokens, plan_microbatches
from torchtitan_rl.trainer.packing import by_member, completion_values, count_work, pack, token_advantages
from torchtitan_rl.types import Completion, Group, Prompt, ScoredCompletion, Trace, TurnRecord, flat

VOCAB = 11
AGGREGATIONS = [TokenMean, SeqMeanTokenMean, SeqSumConst]
LOSSES = [Clip, Gspo, Cispo, Reinforce]
CORRECTIONS = [NoCorrection, TokenTruncate, SequenceTruncate, TokenMask, SequenceMask]


def rollout(chance: random.Random, sample_idx: int) -> Completion:
    """A conversation of 1 to 4 turns in one trace."""
    tokens, mask, turns = [], [], []
    for i in range(chance.randint(1, 4)):
        said, heard = chance.randint(1, 4), chance.randint(1, 3) if i < 3 else 0
        tokens += [chance.randrange(VOCAB) for _ in range(said + heard)]
        mask += [True] * said + [False] * heard
        turns.append(TurnRecord(text="", num_tokens=said, reward=chance.random()))
    logprobs = [-2.7 + 0.6 * chance.random() if sampled else 0.0 for sampled in mask]
    return Completion(
        sample_idx=sample_idx, policy_version=0, token_ids=tokens, sampler_logprobs=logprobs, loss_mask=mask, text="",
        finish_reason="stop", turns=tuple(turns),
    )  # fmt: skip


def cut_into_traces(prompt: Prompt, whole: Completion, chance: random.Random) -> Completion:
    """The same rollout, with a new trace before some of its turns that has all tokens so far as its context."""
    history = [*prompt.token_ids.tolist(), *whole.token_ids.tolist()]
    begins = np.flatnonzero(np.diff(whole.loss_mask.astype(int), prepend=0) == 1)  # [turns]
    cuts = [begin for begin in begins[1:].tolist() if chance.random() < 0.7]
    traces, turns, arrays = [], [], ([], [], [])
    for begin, end in zip([0, *cuts], [*cuts, len(whole.token_ids)]):
        context = history[: len(prompt.token_ids) + begin] if begin else []
        traces.append(Trace(begin=len(arrays[0]), context_tokens=len(context)))
        arrays[0].extend([*context, *whole.token_ids[begin:end]])
        arrays[1].extend([*[0.0] * len(context), *whole.sampler_logprobs[begin:end]])
        arrays[2].extend([*[False] * len(context), *whole.loss_mask[begin:end]])
    for begin, turn in zip(begins.tolist(), whole.turns, strict=True):
        trace = sum(cut <= begin for cut in cuts)
        turns.append(TurnRecord(text="", num_tokens=turn.num_tokens, reward=turn.reward, trace=trace))
    return Completion(
        sample_idx=whole.sample_idx, policy_version=0, token_ids=arrays[0], sampler_logprobs=arrays[1], loss_mask=arrays[2],
        text="", finish_reason="stop", turns=tuple(turns), traces=tuple(traces),
    )  # fmt: skip


def step(seed: int, *, is_cut: bool) -> list[Group[ScoredCompletion]]:
    chance, groups = random.Random(seed), []
    for prompt_idx in range(3):
        tokens = [chance.randrange(VOCAB) for _ in range(chance.randint(2, 5))]
        prompt = Prompt(prompt_idx=prompt_idx, text="", token_ids=tokens, expected_answer="")
        samples = []
        for sample_idx in range(3):
            completion, reward = rollout(chance, sample_idx), chance.random()
            cuts = random.Random(chance.random())
            if is_cut:
                completion = cut_into_traces(prompt, completion, cuts)
            rewards = tuple(turn.reward for turn in completion.turns)
            samples.append(ScoredCompletion(completion=completion, reward=reward + sum(rewards), turn_rewards=rewards))
        groups.append(Group(prompt=prompt, samples=samples))
    return groups


def logprobs_of(weights: Tensor, batch) -> Tensor:
    """[T] log pi of each label under a model whose logits depend on all tokens of the trace so far. weights: [2, V, V]."""
    embedded = weights[0][batch.token_ids]  # [T, V]
    sums = torch.zeros_like(embedded)
    for begin, length in zip(batch.layout.begins.tolist(), batch.layout.lengths.tolist(), strict=True):
        end = begin + length
        counts = torch.arange(1, length + 1, dtype=embedded.dtype)[:, None]  # [L, 1]
        sums[begin:end] = embedded[begin:end].cumsum(0) / counts
    logits = torch.tanh(sums) @ weights[1] * 0.3  # [T, V]
    return logits.log_softmax(-1).gather(1, batch.labels[:, None])[:, 0]  # [T]


def gradient(config: Algorithm.Config, seed: int, *, is_cut: bool, num_ranks: int = 1, epochs: int = 1) -> Tensor:
    """[2, V, V] the gradient of one update, over micro-batches and ranks."""
    algorithm = Algorithm(config, max_completion_tokens=40)
    groups = draft_episodes(step(seed, is_cut=is_cut))
    torch.manual_seed(seed)
    old = torch.randn(2, VOCAB, VOCAB, dtype=torch.float64)
    if algorithm.needs_reference:
        for group in groups:
            for episode in group.samples:
                episode.reference_logprobs = episode.completion.sampler_logprobs - np.float32(0.1)
    algorithm.credit.assign(groups)
    items = items_of(groups, whole_groups=algorithm.policy_loss.whole_groups)
    plans = plan_microbatches(items, num_ranks=num_ranks, max_tokens=60)
    old = old.to(DEVICE_TYPE)
    weights = (old + 0.05 * torch.randn_like(old)).requires_grad_()
    for plan in plans:
        for members in plan:
            batch = pack(
                members, normalizers=algorithm.normalizers(groups), multiple=4,
                columns=algorithm.policy_loss.reads,
            )  # fmt: skip
            batch.pi_old_logprobs = logprobs_of(old, batch)
            logprobs = logprobs_of(weights, batch)
            algorithm.loss(batch, logprobs, torch.zeros_like(logprobs)).loss.backward()
    return weights.grad


def assert_cut_equals_whole(config: Algorithm.Config) -> None:
    for seed in range(3):
        whole, cut = gradient(config, seed, is_cut=False), gradient(config, seed, is_cut=True)
        assert whole.abs().max() > 1e-6
        assert (whole - cut).abs().max() < 1e-6 * whole.abs().max()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_of_a_rollout_cut_into_traces_is_that_of_the_whole_one(aggregation, loss):
    assert_cut_equals_whole(Algorithm.Config(aggregation=aggregation.Config(), loss=loss.Config()))


@pytest.mark.parametrize("mismatch", CORRECTIONS)
def test_corrections_see_all_traces_of_a_rollout_as_one_sequence(mismatch):
    assert_cut_equals_whole(Algorithm.Config(mismatch=mismatch.Config()))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_credit_by_turns_reaches_the_turns_of_each_trace(aggregation):
    assert_cut_equals_whole(Algorithm.Config(aggregation=aggregation.Config(), credit="turn"))


@pytest.mark.parametrize(
    "config",
    [
        {"loss": MaxEnt.Config(tau=0.5)},
        {"loss": MaxEnt.Config(tau=0.5, normalize_policy=True, clip_coef=0.3, clip_ratio="sequence")},
        {"kl": KL.Config(coef=0.1)},
        {"old_logprobs": "sampler"},
    ],
)
def test_losses_over_sequences_and_references_see_one_sequence(config):
    assert_cut_equals_whole(Algorithm.Config(**config))


def test_ranks_and_microbatches_do_not_change_the_gradient_of_traces():
    config = Algorithm.Config(aggregation=SeqMeanTokenMean.Config(), loss=Gspo.Config())
    one, two = (gradient(config, 1, is_cut=True, num_ranks=n) for n in (1, 2))
    torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


def test_turn_advantages_follow_the_trace_of_their_turn():
    turns = [TurnRecord(text="", num_tokens=n, trace=trace) for n, trace in ((1, 0), (2, 1), (1, 0))]
    completion = Completion(
        sample_idx=0, policy_version=0, token_ids=[1, 2, 3, 4, 5, 6], sampler_logprobs=[0.0] * 6, text="", finish_reason="stop",
        loss_mask=[True, False, True, False, True, True], turns=tuple(turns),
        traces=(Trace(), Trace(begin=3, context_tokens=1, parent=0)),
    )  # fmt: skip
    [group] = draft_episodes([Group(
        prompt=Prompt(prompt_idx=0, text="", token_ids=[9], expected_answer=""),
        samples=[ScoredCompletion(completion=completion, reward=1.0)],
    )])  # fmt: skip
    group.samples[0].credit.turn_advantages = (1.0, 2.0, 3.0)
    assert token_advantages(group.samples[0]).tolist() == [1, 0, 3, 0, 2, 2]


@pytest.mark.parametrize("share_prompts", [False, True])
def test_pack_has_every_sampled_token_once_and_no_label_across_traces(share_prompts):
    groups = draft_episodes(step(3, is_cut=True))
    [item_members] = [[member for item in items_of(groups, whole_groups=True) for member in item]]
    normalizers = Algorithm(Algorithm.Config(), max_completion_tokens=40).normalizers(groups)
    batch = pack(item_members, normalizers=normalizers, multiple=1, share_prompts=share_prompts)
    assert int(batch.loss_mask.sum()) == sum(one.completion.num_sampled for one in flat(groups))
    assert len(batch.token_ids) == count_work(item_members, share_prompts=share_prompts)[0]
    rows = torch.stack([batch.labels, batch.sequence_ids, batch.sampler_logprobs])[:, batch.loss_positions].numpy()
    for i, (member, (labels, ids, log_mu)) in enumerate(zip(batch.members, by_member(batch, rows), strict=True)):
        completion = member.episode.completion
        assert labels.tolist() == completion.token_ids[completion.loss_mask].tolist()
        assert set(ids.tolist()) == {i}
        assert log_mu.tolist() == completion.sampled_logprobs.tolist()
    for member, labels in zip(batch.members, completion_values(batch, rows[0]), strict=True):
        assert labels.tolist() == (member.episode.completion.token_ids * member.episode.completion.loss_mask).tolist()
    scores = TokenScores(batch.sampler_logprobs + 0.25, batch.loss_mask)
    compare_with_sampler(batch, scores.at(batch.loss_positions))
    assert all(one.logprob_diff.mean == pytest.approx(0.25) for one in flat(groups))
    assert [len(one.logprob_diff.tokens["diff"]) for one in flat(groups)] == [
        one.completion.num_sampled for one in flat(groups)
    ]


def test_traces_of_a_rollout_share_a_microbatch():
    groups = draft_episodes(step(3, is_cut=True))
    [plan] = plan_microbatches(items_of(groups, whole_groups=False), num_ranks=1, max_tokens=50)
    assert sum(num_tokens(members) for members in plan) == sum(
        len(group.prompt.token_ids) + len(one.completion.token_ids) for group in groups for one in group.samples
    )
    assert len({id(member.episode) for members in plan for member in members}) == 9
