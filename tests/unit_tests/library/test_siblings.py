"""Completions of a long prompt share a micro-batch, as far as that makes a step shorter."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit_tests.core.trainer.test_packing import episode, prompt
from torchtitan_rl.core.trainer.minibatches import plan_microbatches
from torchtitan_rl.core.trainer.packing import count_work
from torchtitan_rl.core.types import Member
from torchtitan_rl.library.shared_prompts import plan_with_siblings, ways_to_join


def siblings(prompt_tokens: int, *lengths: int, prompt_idx: int = 0) -> list[list[Member]]:
    """An item for each completion."""
    of = prompt(tuple(range(prompt_tokens)), prompt_idx)
    return [[Member(of, episode(tuple(range(n)), sample_idx=i))] for i, n in enumerate(lengths)]


def step(num_prompts: int, prompt_tokens: int, draw) -> list[list[Member]]:
    """Items of a step with 8 completions of each prompt."""
    items: list[list[Member]] = []
    for number in range(num_prompts):
        items += siblings(prompt_tokens, *(draw() for _ in range(8)), prompt_idx=number)
    return items


def test_siblings_of_long_prompts_are_joined_as_far_as_they_fit():
    items = siblings(5, 2, 2, 2, 2, 2) + siblings(3, 1, 1, prompt_idx=1)
    ways = [[len(item) for item in way] for way in ways_to_join(items, max_tokens=100, join_siblings_from=4)]
    assert ways == [[1] * 7, [2, 2, 1, 1, 1], [4, 1, 1, 1], [5, 1, 1]]
    # 7 tokens, and 3 for each further one: its own and the prompt's last.
    ways = [[len(item) for item in way] for way in ways_to_join(items, max_tokens=13, join_siblings_from=4)]
    assert ways == [[1] * 7, [2, 2, 1, 1, 1], [3, 2, 1, 1]]
    items = siblings(5, 2, 2, 2) + siblings(5, 2, 2, 2, prompt_idx=1)
    ways = [[len(item) for item in way] for way in ways_to_join(items, max_tokens=100, join_siblings_from=4)]
    assert ways == [[1] * 6, [2, 1, 2, 1], [3, 3]]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=1, max_size=8),
    st.sampled_from([1, 2, 3, 8]),
    st.integers(50, 200),
)
def test_a_joined_plan_has_each_episode_once_within_the_budget_and_is_never_longer(groups, num_ranks, max_tokens):
    items = [one for i, group in enumerate(groups) for one in siblings(4 + 2 * i, *group, prompt_idx=i)]
    options = {"num_ranks": num_ranks, "max_tokens": max_tokens, "attention_cost": 0.0}
    plans = [plan_with_siblings(items, **options, join_siblings_from=8), plan_microbatches(items, **options)]
    planned = [id(member.episode) for rank in plans[0] for members in rank for member in members]
    assert sorted(planned) == sorted(id(item[0].episode) for item in items)
    assert len({len(rank) for rank in plans[0]}) == 1
    tokens = [[[count_work(members, share_prompts_from=8)[0] for members in rank] for rank in plan] for plan in plans]
    assert max(map(max, tokens[0])) <= max_tokens
    slowest = [np.array(of_plan).max(0).sum() for of_plan in tokens]
    assert slowest[0] <= slowest[1]
