"""Finds a run's reward functions and checks their settings."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import get_args

from torchtitan_rl.data.task import RESERVED_COLUMNS, RewardFunction, Task
from torchtitan_rl.errors import UserError, expect
from torchtitan_rl.fields.references import did_you_mean, load_reward
from torchtitan_rl.rewards import Grader
from torchtitan_rl.rewards.reward import JUDGEMENT, Judgement, Reward
from torchtitan_rl.rewards.scorer import Scope, Scorer


def find_scorers(
    config: Grader.Config, task: Task, *, required: bool = True, only_watched: bool = False
) -> dict[str, list[Scorer]]:
    """The reward functions of each member of `task`, in order, and its judgement, which is last. Needs no weights, so it is done before them.

    Args:
        required: whether a task without reward functions is an error. Demonstrations need none.
        only_watched: whether all weights may be 0. A teacher's run learns without rewards.

    Raises UserError for reward functions that cannot be found or called, and for impossible settings.
    """
    extra = [_reward(config, *load_reward(reference)) for reference in config.rewards]
    settings = {"on_failure": config.on_failure, "time_limit_seconds": config.time_limit_seconds}
    members = task.members()
    scorers_of: dict[Task, list[Scorer]] = {}
    for member in members.values():  # held-out tables share a task
        judgement = Judgement(task=member, **settings)
        scorers_of[member] = [*_rewards(config, member, extra, required), judgement]
    rewards = [reward for *of_task, _ in scorers_of.values() for reward in of_task]
    _check(config, list(dict.fromkeys(reward.name for reward in rewards)))
    counts = only_watched or not rewards or any(reward.weight for reward in rewards)
    expected = "a weight other than 0, as there would be no reward"
    expect(counts, "grader.weights", config.weights, expected, "Set one.")
    return {name: scorers_of[member] for name, member in members.items()}


def _reward(config: Grader.Config, name: str, function: RewardFunction) -> Reward:
    """The reward function with its settings. Raises UserError for an attribute `scope` that is none.

    A function that names `log_metric` gets a batch, as in TRL: what it logs may be no mean, such as a calibration error.
    """
    parameters = inspect.signature(function).parameters
    usual = "batch" if "log_metric" in parameters else "group"
    scope = config.scope_of.get(name, getattr(_unwrapped(function), "scope", usual))
    field, is_scope = f"reward function {name}: scope", scope in get_args(Scope)
    expect(is_scope, field, scope, "'group' or 'batch'", "Use 'group'.")
    return Reward(
        name=name,
        function=function,
        weight=config.weights.get(name, 1.0),
        on_failure=config.on_failure_of.get(name, config.on_failure),
        time_limit_seconds=config.time_limit_seconds_of.get(name, config.time_limit_seconds),
        scope=scope,
    )


def _rewards(
    config: Grader.Config, task: Task, extra: Sequence[Reward], required: bool
) -> list[Reward]:
    """The rewards of one task. The rewards of `extra` are those of all members of a mixture.

    Raises UserError for a task without rewards, for two of one name, and for a keyword argument that does not exist.
    """
    own = (_reward(config, _name(function), function) for function in task.reward_functions())
    rewards = [*own, *extra]
    names = [reward.name for reward in rewards]
    expected = "a reward function, as the task has none"
    remedy = "Name one or more, or for rows with an answer task.answer_column."
    expect(bool(names) or not required, "grader.rewards", config.rewards, expected, remedy)
    taken = {name for name in names if names.count(name) > 1 or name in ("error", JUDGEMENT)}
    expected = "names that no other function, error or judgement of the task has"
    remedy = "Give it another name: other_name=path/to/file.py:function."
    expect(not taken, "grader.rewards", sorted(taken), expected, remedy)
    given = RESERVED_COLUMNS | task.train_example(0, seed=0).columns.keys()
    for reward in rewards:
        missing = reward.missing(given)
        expect(
            not missing, f"the arguments of reward function {reward.name}", missing,
            f"columns of the data or what every run has: {', '.join(sorted(given))}",
            f"Name a column of the task, give a default, or call a factory: {reward.name}(...).",
        )  # fmt: skip
    return rewards


def _check(config: Grader.Config, names: list[str]) -> None:
    for setting in ("weights", "on_failure_of", "scope_of", "time_limit_seconds_of", "in_process"):
        by_name = getattr(config, setting)
        known = [*names, JUDGEMENT] if setting == "in_process" else names
        unknown = [name for name in by_name if name not in known]
        if unknown:
            similar = did_you_mean(unknown[0], names)
            raise UserError(
                f"grader.{setting} = {by_name!r}: expected names of reward functions among {names}. {similar}Name a function "
                f"of your own in --grader.rewards too: path/to/file.py:{unknown[0]}."
            )


def _unwrapped(function: Callable) -> Callable:
    while isinstance(function, partial):
        function = function.func
    return function


def _name(function: Callable) -> str:
    function = _unwrapped(function)
    return getattr(function, "__name__", type(function).__name__)
