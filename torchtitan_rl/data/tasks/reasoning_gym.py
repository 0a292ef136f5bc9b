"""reasoning_gym: any of its hundred procedurally generated tasks, or a weighted mix, scored by their own scorers."""

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from torchtitan_rl.data.answer_kinds import KINDS, TAG_REQUEST, KindName
from torchtitan_rl.data.task import Example, RewardFunction, Task
from torchtitan_rl.data.tasks.procedural import ProceduralTask, plain_example
from torchtitan_rl.errors import UserError, expect

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

    from torchtitan_rl.types import Prompt

_NUM_DRAWS = 10_000
"""Number of different questions per task. Some tasks generate them all at construction."""


class ReasoningGym(ProceduralTask):
    """Questions from reasoning_gym. The reward is the task's own score of the answer, 0 to 1."""

    more_with = ", or change task.settings so that more questions exist"

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        tasks: list[tuple[str, float]] = field(default_factory=lambda: [("chain_sum", 1.0)])
        """Names of tasks, each with its sampling weight."""

        settings: list[tuple[str, str]] = field(default_factory=list)
        """Settings of individual tasks, as task.setting and a JSON value, such as chain_sum.max_terms 3."""

        instruction: str = TAG_REQUEST
        """Text added to each question as a separate paragraph. Empty: nothing."""

        answer_kind: KindName = "tag"
        """The answer in a completion, as `Rows.Config.answer_kind`. Change `instruction` with it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._weights = dict(config.tasks)
        names, field = list(self._weights), "task.tasks"
        expect(bool(names), field, config.tasks, "one task or more", "Use chain_sum 1.")
        for name, weight in config.tasks:
            remedy = "Leave the task out instead."
            expect(weight > 0, f"{field} {name}", weight, "a weight above 0", remedy)
        self._sources = {name: _source(name, self._settings(name)) for name in names}
        of_others = sorted({setting.partition(".")[0] for setting, _ in config.settings} - {*names})
        known, remedy = f"settings of {names}", "Write task.setting VALUE."
        expect(not of_others, "task.settings", of_others, known, remedy)

    def draws(self, key: str) -> Iterator[dict[str, Any]]:
        for attempt in count():
            yield self.draw(random.Random(f"{key}/{attempt}"))

    def draw(self, rng: random.Random) -> dict[str, Any]:
        [name] = rng.choices(list(self._weights), list(self._weights.values()))
        return self._sources[name][rng.randrange(_NUM_DRAWS)]

    def example(self, problem: dict[str, Any]) -> Example:
        question = "\n\n".join(filter(None, [problem["question"].strip(), self.config.instruction]))
        return plain_example(question, problem["answer"] or "", entry=problem)

    def key(self, problem: dict[str, Any]) -> str:
        return self.example(problem).text

    def reward_functions(self) -> Sequence[RewardFunction]:
        return (self.score,)

    def score(self, *, completions: list, entry: list[dict[str, Any]], **_: Any) -> list[float]:
        return [self._score(self.answer(c), e) for c, e in zip(completions, entry, strict=True)]

    def extract_answer(self, text: str) -> str | None:
        return KINDS[self.config.answer_kind].extract(text)

    def judge(self, answer: str | None, prompt: "Prompt") -> bool:
        """Returns whether the answer gets the full score. Many tasks have more than one right answer."""
        return self._score(answer, prompt.columns["entry"]) >= 0.999

    def _score(self, answer: str | None, entry: dict[str, Any]) -> float:
        """Returns the task's score; 0 for an answer that it cannot parse, for which some tasks raise an error."""
        source = self._sources[entry["metadata"]["source_dataset"]]
        try:
            return float(source.score_answer(answer, entry))
        except (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError):
            return 0.0

    def _settings(self, name: str) -> dict[str, Any]:
        """Returns the settings of a task. A value that is no JSON is a text."""
        settings: dict[str, Any] = {}
        for key, value in self.config.settings:
            task, _, setting = key.partition(".")
            if task == name:
                settings[setting] = value
                with suppress(ValueError):
                    settings[setting] = json.loads(value)
        return settings


def _source(name: str, settings: dict[str, Any]) -> "ProceduralDataset":
    """Returns reasoning_gym's data set of that name. Raises UserError for an unknown name or invalid settings."""
    try:
        from reasoning_gym.factory import create_dataset
    except ImportError as error:
        raise UserError(
            f"task.tasks: expected reasoning-gym to be installed, but: {error}. pip install 'reasoning-gym~=0.1.25'; its pycosat "
            "needs a C compiler and Python's headers (apt install gcc python3-dev)."
        ) from error
    import reasoning_gym  # noqa: F401  (fills the registry)

    try:
        return create_dataset(name, seed=0, size=_NUM_DRAWS, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"task.tasks {name} with task.settings {settings!r}: {error}.") from error
