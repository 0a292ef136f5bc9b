"""`--preview`: what sampled answers mean for training."""

import pytest

from tests.parts.observability import group, sample
from torchtitan_rl.command.preview import measures, verdict


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([(0, 1), (1, 0)], "2 of 2 groups have different rewards: there is something to learn from."),
        ([(0, 0), (0, 0)], "0 of 2 groups have different rewards: in these there is nothing to learn from. "),
        ([(0, 1)] + 7 * [(0, 0)], "1 of 8 groups have different rewards: a step learns little."),
    ],
)
def test_only_groups_with_different_rewards_have_something_to_learn_from(rewards, said):
    groups = [group(i, *(sample(reward=float(one)) for one in of_group)) for i, of_group in enumerate(rewards)]
    assert verdict(groups).startswith(said)
    assert f"{2 * len(rewards)} answers: reward" in measures(groups)
