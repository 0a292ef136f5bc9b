"""What an environment gives for each turn is weighted as in the sum, for credit by turns."""

import pytest

from tests.parts.grading import constant
from torchtitan_rl.environments import environment_reward
from torchtitan_rl.types import Completion, Group, Prompt, TurnRecord


def talked(*turn_rewards):
    """A group of one conversation, whose turns have these rewards."""
    turns = tuple(TurnRecord(text="a", num_tokens=1, reward=reward) for reward in turn_rewards)
    tokens = list(range(len(turns)))
    completion = Completion(
        sample_idx=0, policy_version=0, token_ids=tokens, sampler_logprobs=[-0.5] * len(turns), text="a", finish_reason="stop", turns=turns
    )  # fmt: skip
    return Group(prompt=Prompt(prompt_idx=0, text="?", token_ids=[1], expected_answer=""), samples=[completion])


@pytest.mark.parametrize(
    ("functions", "reward", "of_turns"),
    [
        ([environment_reward], 3.0, (1.0, 0.0, 2.0)),
        ([environment_reward, constant(5.0)], 8.0, (1.0, 0.0, 2.0)),
        ([constant(5.0)], 5.0, (0.0, 0.0, 0.0)),
    ],
)
def test_turn_rewards_come_only_from_the_environment(build, functions, reward, of_turns):
    weights = {"environment_reward": 2.0} if environment_reward in functions else {}
    [[scored]] = [group.samples for group in build(*functions, weights=weights).grade([talked(0.5, None, 1.0)])]
    assert (scored.reward, scored.turn_rewards) == (reward, of_turns)
