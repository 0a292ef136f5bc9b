"""The synthetic step before the engine starts: sound objectives pass, faulty parts are named."""

import dataclasses

import pytest

from tests.parts.wrong_parts import CASES, trial
from tests.unit_tests.algorithm.test_invariants import ALGORITHMS
from torchtitan_rl.build.trial import try_objective
from torchtitan_rl.command.registry import config_functions, load_config
from torchtitan_rl.errors import UserError
from torchtitan_rl.types import Prompt

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


@pytest.mark.parametrize(("parts", "message"), CASES, ids=[next(iter(parts.values())).__name__ for parts, _ in CASES])
def test_a_faulty_part_is_named(parts, message):
    with pytest.raises(UserError, match=message):
        trial(**parts)
