import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.parts.algorithm import built
from tests.parts.random_update import LONGEST, VOCABULARY, cut_into_traces, draw_prompts, groups_of, random_sample
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.models.score import TokenScores
from torchtitan_rl.trainer.logprob_diff import compare_with_sampler
from torchtitan_rl.trainer.minibatches import Batcher, Item, Plan, items_of, num_tokens, split_groups
from torchtitan_rl.trainer.packing import by_member, completion_values, count_work, pack
from torchtitan_rl.types import (
    NO_RECORD,
    Completion,
    Credit,
    Episode,
    Group,
    Member,
    Normalizers,
    Prompt,
    ScoredCompletion,
    Trace,
    TrainBatch,
    flat,
)

COUNTS = Normalizers(num_tokens=10, num_sequences=3, num_groups=2, max_completion_tokens=8)


def episode(tokens=(8, 9), *, sample_idx=0, advantage=1.0, left_out=None, mask=None) -> Episode:
    completion = Completion(
        sample_idx=sample_idx, policy_version=0, token_ids=tokens, sampler_logprobs=[-0.5 - i for i in range(len(tokens))],
        loss_mask=mask, text="", finish_reason="stop",
    )  # fmt: skip
    scored = ScoredCompletion(completion=completion, reward=1.0)
    return Episode(scored=scored, credit=Credit(advantage=advantage, left_out=left_out))


def prompt(tokens=(5, 6, 7), prompt_idx=0) -> Prompt:
    return Prompt(prompt_idx=prompt_idx, text="", token_ids=tokens, expected_answer="")


def member(prompt_tokens=(5, 6, 7), tokens=(8, 9), **kwargs) -> Member:
    return Member(prompt(prompt_tokens), episode(tokens, **kwargs))


def group(prompt_idx: int, *episodes: Episode) -> Group[Episode]:
    return Group(prompt=prompt(prompt_idx=prompt_idx), samples=list(episodes))


def of_lengths(*sizes: list[int]) -> list[list[Member]]:
    """Atoms whose sequences have these many tokens, one of them the prompt's."""
    return [[member((1,), tuple(range(n - 1))) for n in item] for item in sizes]


def plan_of(items: list[Item], **settings) -> Plan:
    return Batcher(algorithm=built(), **settings).plan(items)


def test_labels_are_shifted_to_the_predicted_token():
    batch = pack([member(), member((1,), (2, 3, 4), advantage=-2.0)], normalizers=COUNTS, multiple=8)
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9, 1, 2, 3, 4] + [0] * 7
    assert batch.labels.tolist()[:9] == [6, 7, 8, 9, 0, 2, 3, 4, 0]
    padding = [0, 1, 2, 3, 4, 0, 1]  # no longer than the longest
    assert batch.layout.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3] + padding
    assert batch.loss_mask.tolist() == [0, 0, 1, 1, 0, 1, 1, 1, 0] + [0] * 7
    assert batch.sampler_logprobs.tolist()[:9] == [0, 0, -0.5, -1.5, 0, -0.5, -1.5, -2.5, 0]
    assert batch.advantages.tolist()[:9] == [0, 0, 1, 1, 0, -2, -2, -2, 0]
    assert batch.sequence_ids.tolist() == [0] * 5 + [1] * 4 + [2] * 7


def test_siblings_share_the_prompt_except_its_last_token():
    siblings = member((5, 6, 7), (8, 9)), member((5, 6, 7), (4,), advantage=-2.0)
    members = [*siblings, Member(prompt((1, 2), 1), episode((3,)))]
    batch = pack(members, normalizers=COUNTS, multiple=1, share_prompts=True)
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9, 7, 4, 1, 2, 3]
    assert batch.labels.tolist() == [6, 7, 8, 9, 0, 4, 0, 2, 3, 0]
    assert batch.layout.positions.tolist() == [0, 1, 2, 3, 4, 2, 3, 0, 1, 2]
    assert batch.loss_mask.tolist() == [0, 0, 1, 1, 0, 1, 0, 0, 1, 0]
    assert batch.advantages.tolist() == [0, 0, 1, 1, 0, -2, 0, 0, 1, 0]
    assert batch.sequence_ids.tolist() == [0] * 5 + [1] * 2 + [2] * 3
    assert count_work(members, share_prompts=True) == (10, (1 + 2 + 3 + 4 + 5) + (3 + 4) + (1 + 2 + 3), 4)
    assert count_work(members, share_prompts=False) == (12, (1 + 2 + 3 + 4 + 5) + (1 + 2 + 3 + 4) + (1 + 2 + 3), 4)


def test_siblings_whose_prompts_differ_share_the_tokens_with_which_both_begin():
    members = [member((5, 6, 7), (8,)), member((5, 6, 1, 2), (4,)), member((3, 6, 7), (9,))]
    batch = pack(members, normalizers=COUNTS, multiple=1, share_prompts=True)
    assert batch.token_ids.tolist() == [5, 6, 7, 8] + [1, 2, 4] + [3, 6, 7, 9]
    assert batch.layout.positions.tolist() == [0, 1, 2, 3] + [2, 3, 4] + [0, 1, 2, 3]


def compacted(first: tuple, context: tuple, then: tuple) -> Member:
    """A member whose agent wrote its context anew: it samples `first` after the prompt, and `then` after `context`."""
    made = member(
        (5, 6, 7, 8), (*first, *context, *then), mask=[True] * len(first) + [False] * len(context) + [True] * len(then)
    )
    traces = (Trace(), Trace(begin=len(first), context_tokens=len(context)))
    completion = replace(made.episode.completion, traces=traces)
    return Member(made.prompt, replace(made.episode, scored=ScoredCompletion(completion=completion, reward=1.0)))


def test_later_traces_share_the_beginning_of_an_earlier_trace():
    members = [compacted((1, 2), (5, 6, 7, 3), (9,)), compacted((4,), (5, 6, 7, 8, 1, 3), (2,))]
    batch = pack(members, normalizers=COUNTS, multiple=1, share_prompts=True)
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 1, 2] + [8, 4] + [3, 9] + [3, 2]
    assert batch.layout.positions.tolist() == [0, 1, 2, 3, 4, 5] + [3, 4] + [3, 4] + [5, 6]
    assert batch.layout.roots.tolist() == [0, 0, 0, 0]
    assert batch.labels[batch.loss_positions].tolist() == [1, 2, 4, 9, 2]
    assert len(batch.token_ids) == count_work(members, share_prompts=True)[0]


def test_contexts_of_sub_agents_share_with_each_other_and_not_the_first_token_of_a_prompt():
    members = [compacted((1, 2), (5, 20, 21, 22, 23), (9,)), compacted((4,), (5, 20, 21, 22, 24), (2,))]
    batch = pack(members, normalizers=COUNTS, multiple=1, share_prompts=True)
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 1, 2] + [8, 4] + [5, 20, 21, 22, 23, 9] + [24, 2]
    assert batch.layout.roots.tolist() == [0, 0, 8, 8]


@given(
    st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=4), max_size=30),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.integers(10, 120),
    st.booleans(),
)
def test_plan_has_each_item_once_within_the_budget_and_equal_counts_by_rank(sizes, num_ranks, max_tokens, by_prompt):
    items = of_lengths(*sizes)
    plans = plan_of(items, num_ranks=num_ranks, max_tokens=max_tokens, share_prompts=by_prompt)
    planned = [id(m.episode) for plan in plans for batch in plan for m in batch]
    assert sorted(planned) == sorted(id(m.episode) for item in items for m in item)
    assert len({len(plan) for plan in plans}) == 1
    assert len(plans[0]) >= bool(items)
    batch_of = {id(m.episode): (r, b) for r, plan in enumerate(plans) for b, batch in enumerate(plan) for m in batch}
    assert all(len({batch_of[id(m.episode)] for m in item}) == 1 for item in items)
    item_of = {id(m.episode): i for i, item in enumerate(items) for m in item}
    for batch in (batch for plan in plans for batch in plan):
        whole = len({item_of[id(m.episode)] for m in batch})
        assert whole <= 1 or sum(m.num_tokens for m in batch) <= max_tokens


@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=8), min_size=1, max_size=16), st.integers(60, 300))
def test_plan_by_prompt_divides_no_more_prompts_than_it_has_borders_between_micro_batches(groups, max_tokens):
    made = [group(i, *(episode(range(n), sample_idx=j) for j, n in enumerate(of))) for i, of in enumerate(groups)]
    items = items_of(made, whole_groups=False)
    [plan] = plan_of(items, max_tokens=max_tokens, share_prompts=True)
    held = sum(len({member.prompt.prompt_idx for member in batch}) for batch in plan)
    assert held <= len(groups) + len(plan) - 1
    own = sum(count_work(batch, share_prompts=True)[0] for batch in plan)
    scattered = plan_of(items, max_tokens=max_tokens)[0]
    assert own <= sum(count_work(batch, share_prompts=True)[0] for batch in scattered) + 2 * len(plan)


@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=8), min_size=1, max_size=16),
    st.integers(60, 300),
    st.integers(1, 4),
)
def test_prompts_that_are_read_once_count_once_and_have_their_siblings_beside_them(groups, max_tokens, num_ranks):
    made = [group(i, *(episode(range(n), sample_idx=j) for j, n in enumerate(of))) for i, of in enumerate(groups)]
    items = items_of(made, whole_groups=False)
    options = {"num_ranks": num_ranks, "max_tokens": max_tokens, "share_prompts": True}
    plan = plan_of(items, **options, read_prompts_once=True)
    planned = sorted(id(member.episode) for rank in plan for batch in rank for member in batch)
    assert planned == sorted(id(member.episode) for item in items for member in item)
    tokens = [[count_work(batch, share_prompts=True)[0] for batch in rank] for rank in plan]
    assert max(map(max, tokens)) <= max_tokens
    loads = [sum(of_rank) for of_rank in tokens]
    assert max(loads) - min(loads) <= sum(map(num_tokens, items)) / (4 * num_ranks) + 43


def test_a_group_stays_on_its_rank_if_there_are_enough():
    made = [group(i, *(episode(range(20), sample_idx=j) for j in range(6))) for i in range(8)]
    items = items_of(made, whole_groups=False)
    plan = plan_of(items, num_ranks=2, max_tokens=128, share_prompts=True, read_prompts_once=True)
    assert [[{member.prompt.prompt_idx for member in batch} for batch in rank] for rank in plan] == [
        [{0}, {2}, {4}, {6}],
        [{1}, {3}, {5}, {7}],
    ]
    assert all(count_work(batch, share_prompts=True)[0] == 128 for rank in plan for batch in rank)


def test_packing_units_are_episodes_or_whole_groups():
    groups = [
        group(0, episode(), episode(left_out="truncated"), episode()),
        group(1, episode(), episode(tokens=()), episode(mask=(False, False))),
    ]
    first, second = ([e for e in g.samples if e.in_loss and e.completion.num_sampled] for g in groups)
    assert [[m.episode for m in a] for a in items_of(groups, whole_groups=False)] == [[e] for e in (*first, *second)]
    assert [[m.episode for m in a] for a in items_of(groups, whole_groups=True)] == [first, second]


@pytest.mark.parametrize(("parts", "sizes"), [(1, [3]), (2, [2, 1]), (3, [1, 1, 1]), (5, [1, 1, 1])])
def test_mini_batches_contain_whole_groups_with_a_signal(parts, sizes):
    groups = [group(i, episode(), episode(left_out="truncated")) for i in range(3)]
    groups.append(group(3, episode(left_out="zero variance")))
    split = split_groups(groups, parts)
    assert [len(part) for part in split] == sizes
    assert sorted(g.prompt.prompt_idx for part in split for g in part) == [0, 1, 2]


def recorded(made: Member) -> Member:
    """The member with a record of one byte at each token: the token's id plus 100."""
    completion = made.episode.completion
    tokens = np.concatenate([made.prompt.token_ids, completion.token_ids])
    found = replace(completion, sampler_records=(tokens + 100).astype(np.uint8)[:, None])
    return Member(made.prompt, Episode(scored=ScoredCompletion(completion=found, reward=1.0)))


@pytest.mark.parametrize("share_prompts", [False, True])
def test_records_stand_at_the_token_that_was_read(share_prompts):
    members = [recorded(member((5, 6, 7), (8, 9))), recorded(member((5, 6, 7), (4, 3, 2)))]
    batch = pack(members, normalizers=COUNTS, multiple=8, share_prompts=share_prompts)
    used = len(batch.token_ids) - batch.layout.padding
    assert batch.sampler_records[:used, 0].tolist() == [100 + token for token in batch.token_ids[:used].tolist()]
    assert (batch.sampler_records[used:] == NO_RECORD).all()


def test_records_of_later_traces_follow_the_first_traces():
    two = replace(member((1,), (2, 3, 4, 5)).episode.completion, traces=(Trace(), Trace(begin=2, context_tokens=1)))
    made = Member(prompt((1,)), Episode(scored=ScoredCompletion(completion=two, reward=1.0)))
    batch = pack([recorded(made), recorded(member((1,), (7,)))], normalizers=COUNTS, multiple=1, share_prompts=True)
    assert batch.token_ids.tolist() == [1, 2, 3, 1, 7, 4, 5]
    assert batch.sampler_records[:, 0].tolist() == [101, 102, 103, 101, 107, 104, 105]


def cut_conversations() -> list[Group[Episode]]:
    """Three groups of three conversations, cut into traces."""
    rng = random.Random(3)
    groups = []
    for length in (2, 3, 5):
        samples = [random_sample(rng, 1.0, "random") for _ in range(3)]
        for sample in samples:
            sample["mu"] = [-float(np.float32(rng.random())) * sampled for sampled in sample["mask"]]
            sample["reference"] = sample["mu"]
        groups.append(
            {"prompt": [rng.randrange(VOCABULARY) for _ in range(length)], "limit": LONGEST, "samples": samples}
        )
    draw_prompts(groups, rng)
    cut_into_traces({"groups": groups}, rng)
    drafts = draft_episodes(groups_of({"groups": groups}))
    assert {len(one.completion.traces) for one in flat(drafts)} == {1, 2, 3}
    return drafts


def spans(made: Member) -> list[slice]:
    """The places of the traces among the member's tokens."""
    start = len(made.prompt.token_ids)
    first, *others = made.episode.completion.spans
    return [slice(0, start + first.stop), *(slice(start + one.start, start + one.stop) for one in others)]


def read(batch: TrainBatch) -> list[list[int]]:
    """What attention sees of each segment: the tokens that it shares, and its own."""
    tokens, layout = batch.token_ids.tolist(), batch.layout
    begins, roots = layout.begins.tolist(), layout.roots.tolist()
    shared = layout.positions[layout.begins].tolist()
    ends = [*begins[1:], len(tokens)]
    return [
        tokens[root : root + count] + tokens[begin:end]
        for root, count, begin, end in zip(roots, shared, begins, ends, strict=True)
    ]


@pytest.mark.parametrize("share_prompts", [False, True])
def test_pack_has_all_tokens_in_order_and_no_label_across_traces(share_prompts):
    groups = cut_conversations()
    members = [member for item in items_of(groups, whole_groups=True) for member in item]
    batch = pack(members, normalizers=COUNTS, multiple=1, share_prompts=share_prompts)
    assert len(batch.token_ids) == count_work(members, share_prompts=share_prompts)[0]
    traces = [made.token_ids[span].tolist() for made in members for span in spans(made)]
    assert sorted(read(batch)) == sorted(traces)
    rows = torch.stack([batch.labels, batch.sampler_logprobs])[:, batch.loss_positions].numpy()
    for made, (labels, log_mu) in zip(batch.members, by_member(batch, rows), strict=True):
        completion = made.episode.completion
        assert labels.tolist() == completion.token_ids[completion.loss_mask].tolist()
        assert log_mu.tolist() == completion.sampled_logprobs.tolist()
    for made, labels in zip(batch.members, completion_values(batch, rows[0]), strict=True):
        assert labels.tolist() == (made.episode.completion.token_ids * made.episode.completion.loss_mask).tolist()
    scores = TokenScores(batch.sampler_logprobs + 0.25, batch.loss_mask)
    compare_with_sampler(batch, scores.at(batch.loss_positions))
    assert all(one.logprob_diff.mean == pytest.approx(0.25) for one in flat(groups))
    assert all(len(one.logprob_diff.tokens["diff"]) == one.completion.num_sampled for one in flat(groups))
