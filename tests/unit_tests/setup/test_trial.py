"""The synthetic step before the engine starts: sound objectives pass, faulty parts are named."""

import dataclasses

import pytest

from tests.parts.wrong_parts import RaisesLoss, SortsRewards, trial
from tests.unit_tests.core.algorithm.test_invariants import ALGORITHMS
from torchtitan_rl.core.algorithm import GroupFilter
from torchtitan_rl.core.errors import UserError
from torchtitan_rl.core.types import Prompt
from torchtitan_rl.library.maxent import ListwiseLoss
from torchtitan_rl.setup.registry import config_functions, load_config
from torchtitan_rl.setup.trial import try_objective

PROMPT = Prompt(prompt_idx=0, text="1 + 1 =", token_ids=[1, 2, 3], expected_answer="2")


@pytest.mark.parametrize("name", config_functions())
def test_the_objective_of_every_config_passes(name):
    try_objective(load_config(name), PROMPT, ["correct"])


@pytest.mark.parametrize("credit", ["episode", "turn"])
@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
@pytest.mark.parametrize("n", [2, 100])
def test_every_kind_of_objective_passes(algorithm, n, credit):
    config = load_config("debug")
    if credit == "episode" or algorithm.seed_grpo is None and type(algorithm.loss).__qualname__ != "MaxEnt.Config":
        config.algorithm, config.sampling.n = dataclasses.replace(algorithm, credit=credit), n
        try_objective(config, PROMPT, ["correct"])


def test_a_part_that_raises_is_named_with_its_line():
    with pytest.raises(UserError, match=r"raised RuntimeError: The size .*wrong_parts.py, line \d+\). Correct it"):
        trial(loss=RaisesLoss)


def test_an_advantage_cannot_change_the_rewards_of_the_group():
    with pytest.raises(UserError, match="AttributeError: 'tuple' object has no attribute 'sort'"):
        trial(advantage=SortsRewards)


class OwnColumn(ListwiseLoss):
    """A loss of groups whose column has the name of one of the tables' own."""

    sequence_columns = (*ListwiseLoss.sequence_columns, "reward")

    def weigh(self, members):
        super().weigh(members)
        for episode in members:
            episode.credit.columns["reward"] = 1.0

    def __call__(self, inputs):
        return -inputs.columns["mass"] * inputs.sequences.sum(inputs.logprobs)


class ForgetsColumn(OwnColumn):
    weigh = ListwiseLoss.weigh


def test_a_column_of_the_tables_own_and_a_column_that_is_not_set_are_named():
    with pytest.raises(UserError, match=r"the sample tables have columns named \['reward'\] already"):
        trial(loss=OwnColumn)
    with pytest.raises(UserError, match="asks the batch for the column 'reward', which an episode in the loss has not"):
        trial(loss=ForgetsColumn)


class ReadsColumns(GroupFilter):
    """A filter that reads what a reward function logs."""

    def left_out(self, group):
        return None if any(one.extra["my_reward/difficulty"] > 0.5 for one in group.samples) else "easy"


class SaysYes(GroupFilter):
    def left_out(self, group):
        return True


def test_a_filter_may_read_columns_that_only_a_real_reward_logs():
    config = load_config("debug")
    config.algorithm.group_filter = ReadsColumns.Config()
    try_objective(config, PROMPT, ["correct"])


def test_a_filter_that_returns_no_reason_is_named():
    config = load_config("debug")
    config.algorithm.group_filter = SaysYes.Config()
    with pytest.raises(UserError, match="algorithm.group_filter: SaysYes.left_out returned True: expected the reason"):
        try_objective(config, PROMPT, ["correct"])
