"""The synthetic step before the engine starts: sound objectives pass, faulty parts are named."""

import dataclasses

import pytest

from tests.parts.wrong_parts import RaisesLoss, trial
from tests.unit_tests.core.algorithm.test_invariants import ALGORITHMS
from torchtitan_rl.core.algorithm import GroupFilter
from torchtitan_rl.core.errors import UserError
from torchtitan_rl.core.types import Prompt
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
