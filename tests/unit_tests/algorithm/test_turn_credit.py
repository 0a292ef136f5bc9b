"""Advantages of the turns of a conversation, and what becomes of conversations that were cut."""

import pytest

from tests.parts.algorithm import built, episodes_of, group_of
from torchtitan_rl.algorithm import GroupMean, Truncation
from torchtitan_rl.types import Completion, ScoredCompletion, TurnRecord


def conversation(sample_idx: int, *earned: float, final: float = 0.0, end: str = "stop") -> ScoredCompletion:
    """Turns of 1, 2, ... sampled tokens, each followed by one observed token, and a reward for the whole beside theirs."""
    mask = [sampled for turn in range(len(earned)) for sampled in [True] * (turn + 1) + [False]]
    turns = tuple(TurnRecord(text="", num_tokens=n + 1, reward=reward) for n, reward in enumerate(earned))
    completion = Completion(
        sample_idx=sample_idx, policy_version=0, token_ids=[5] * len(mask), sampler_logprobs=[-0.5 * m for m in mask],
        loss_mask=mask, text="", finish_reason=end, turns=turns,
    )  # fmt: skip
    return ScoredCompletion(completion=completion, reward=sum(earned) + final, turn_rewards=earned)


def test_group_with_equal_totals_and_different_turns_has_variance():
    pair = group_of(0, conversation(0, 1.0, 0.0), conversation(1, 0.0, 1.0))  # returns [1, 0] and [1, 1]
    for choice in ("keep", "drop", "refill"):
        by_turn, whole = (
            built(advantage=GroupMean.Config(), credit=credit, zero_variance=choice) for credit in ("turn", "episode")
        )
        episodes = episodes_of(by_turn, pair)
        assert [e.credit.turn_advantages for e in episodes] == [(0.0, -0.5), (0.0, 0.5)]
        assert all(episode.in_loss for episode in episodes)
        assert by_turn.credit.rewards_differ(pair.samples)
        assert not whole.credit.rewards_differ(pair.samples)
    alike = conversation(0, 0.0, 1.0), conversation(1, 0.0, 1.0), conversation(2, 0.0, 1.0, 0.0)
    assert not by_turn.credit.rewards_differ(alike)  # only one sample has a third turn


@pytest.mark.parametrize("end", ["length", "max_tokens", "max_turns", "time"])
def test_conversation_cut_by_any_limit_is_masked_or_penalised(end):
    pair = conversation(0, 1.0, end=end), conversation(1, 0.0)
    masked = built(advantage=GroupMean.Config(), truncation=Truncation.Config(mode="mask"))
    assert [e.credit.left_out for e in episodes_of(masked, group_of(0, *pair))] == ["truncated", None]
    fined = built(advantage=GroupMean.Config(), truncation=Truncation.Config(cut_reward=-0.5))
    assert [e.credit.shaped_reward for e in episodes_of(fined, group_of(0, *pair))] == [0.5, 0.0]
    only = built(truncation=Truncation.Config(mode="mask", cut=("length",)))
    assert [e.in_loss for e in episodes_of(only, group_of(0, *pair))] == [end != "length", True]
