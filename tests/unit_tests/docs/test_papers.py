"""docs/papers.md: the lines of every row train one step, and every choice of the objective has a row."""

import inspect
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.parts.tiny import save_tiny_checkpoint, tiny_spec
from tests.parts.tiny_trainer import MAX_TOKENS, scored_step, tiny_trainer, weights
from torchtitan_rl import algorithm as core_algorithm
from torchtitan_rl.algorithm import Advantage, Aggregation, Algorithm, Loss, Mismatch, NoCorrection
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.algorithm.losses.optimal_baseline import LOG_COLLISIONS
from torchtitan_rl.command.registry import load_config
from torchtitan_rl.trainer.teachers.exact_teacher import ExactTeacher
from torchtitan_rl.trainer.teachers.frozen_models import Collisions, Reference
from torchtitan_rl.trainer.teachers.sampled_teacher import Teacher
from torchtitan_rl.types import flat
from torchtitan_rl.validation import validate

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "papers.md").read_text()
LINE = re.compile(r"`((?:algorithm|trainer|in_flight|sampling)\.[\w.]+ = [^`]+)`")


def rows() -> dict[str, list[str]]:
    """The lines of config of each row, by the row's number and first cell."""
    found: dict[str, list[str]] = {}
    for row in PAGE.splitlines():
        lines = LINE.findall(row)
        if row.startswith("| ") and lines:
            name = f"{len(found)} {row.split(' | ')[0].removeprefix('| ')}"
            found[name] = lines
    return found


def with_lines(lines: list[str]):
    """`debug` with the lines of a row."""
    config = load_config("debug")
    config.algorithm = Algorithm.Config()
    for line in lines:
        exec(f"config.{line}", {**vars(core_algorithm), "config": config})
    config.algorithm.__post_init__()  # which checks the fields together
    return config


@pytest.fixture(scope="module")
def trainers(one_rank, tmp_path_factory):
    """One trainer for the rows without a divergence and one for the rows with it. Each row changes its algorithm."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_checkpoint(folder)
    found = {taught: tiny_trainer(str(folder), num_steps=1000) for taught in (False, True)}
    return found, ExactTeacher(found[True], found[True].loader.frozen(tiny_spec(), folder))


@pytest.mark.parametrize("row", rows())
def test_lines_of_a_row_train_one_step(trainers, row):
    config = with_lines(rows()[row])
    objective = config.algorithm.build(max_completion_tokens=MAX_TOKENS)
    if objective.policy_loss.from_engine and not objective.policy_loss.needs_teacher:
        validate(config, world_size=1)
    taught = objective.policy_loss.divergence_beta is not None
    trainer, teacher = trainers[0][taught], trainers[1] if taught else None
    trainer.algorithm = trainer.batcher.algorithm = objective
    trainer.config.num_minibatches = config.trainer.num_minibatches
    groups = draft_episodes(scored_step())
    for episode in flat(groups):
        episode.scored = replace(episode.scored, reward=abs(episode.reward))  # 0 to 1, as MaxRL's
    if objective.needs_reference:
        Reference(trainer).add_logprobs(groups)
    if objective.policy_loss.needs_teacher:
        Teacher.of_folder(trainer, tiny_spec(), Path(trainer.loader.folder)).add_logprobs(groups)
    if LOG_COLLISIONS in objective.policy_loss.reads:
        Collisions(trainer).add_logprobs(groups)
    objective.credit.assign(groups)
    before = weights(trainer)
    report = trainer.update(groups, teacher)
    assert report.optimizer_steps == config.trainer.num_minibatches
    assert math.isfinite(report.grad_norm)
    if config.trainer.num_minibatches == 1 and "Mask" not in str(rows()[row]):
        assert report.grad_norm > 0  # else the last mini-batch, or all made-up samples, may be clipped or masked
    assert not (weights(trainer) == before).all()


def test_every_choice_of_the_objective_has_a_row():
    bases = (Advantage, Aggregation, Loss, Mismatch)
    known = set()
    for name, value in vars(core_algorithm).items():
        if inspect.isclass(value) and issubclass(value, bases) and not inspect.isabstract(value):
            known.add(name)
    known -= {NoCorrection.__name__}
    known |= {"TauController", "BetaController", "MetaController", "k1", "k2", "k3"}
    in_rows = " ".join(line for lines in rows().values() for line in lines) + PAGE
    assert {name for name in known if not re.search(rf"\b{name}\b", in_rows)} == set()
    assert len(rows()) > 40
