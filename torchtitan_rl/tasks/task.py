"""What a task is: examples to ask about, and one judgement of the answers, used by training and evaluation alike."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan.config import Configurable

RewardFunction = Callable[..., Any]
"""TRL's: keywords `prompts`, `completions`, `completion_ids` and columns in, one float or None a completion out."""

RESERVED_COLUMNS = frozenset({"prompts", "completions", "completion_ids", "expected_answer", "log_extra", "log_metric"})
"""Keywords that the grader itself hands to reward functions, so no data set column may be named so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One question before it meets a tokenizer.

    Example: Example(text="What is 12 + 34?\\n", expected_answer="46", columns={"operands": [12, 34]})
    """

    text: str
    """The prompt as plain text."""
    expected_answer: str
    messages: list[dict[str, str]] | None = None
    """The same prompt as chat messages, used instead of `text` where a chat template is applied; None: no such form."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Further columns, handed by name to the reward functions that name them."""

    def __post_init__(self) -> None:
        if clash := sorted(RESERVED_COLUMNS & self.columns.keys()):
            raise ValueError(
                f"Example.columns has {clash}, which are names the grader hands to reward functions itself. "
                "Rename these columns in the task."
            )


class Task(ABC, Configurable):
    """Examples and their judgement. Stateless: every method is a pure function of the config and its arguments.

    Subclass it with a nested Config and these methods, and put that Config into `Controller.Config.task`;
    docs/rewards.md has a complete one.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

    @abstractmethod
    def train_example(self, index: int, *, seed: int) -> Example:
        """The training example at place `index` (0, 1, 2, ... without end) of the stream that `seed` names.

        Random access is what makes a run resumable: the whole position of the data is one integer. For a finite data
        set of N rows shuffle the rows by (seed, index // N) and take the one at index % N.
        """

    @abstractmethod
    def held_out_examples(self, num: int) -> list[Example]:
        """The first `num` examples of a fixed list that no training stream, whatever its seed, ever touches.

        Raises UserError when there are not so many.
        """

    @abstractmethod
    def reward_functions(self) -> Sequence[RewardFunction]:
        """The functions that score completions, in TRL's signature; a function's `__name__` names it in every table."""

    @abstractmethod
    def extract_answer(self, text: str) -> str | None:
        """The answer that a completion's text gives, in canonical form; None when it gives none."""

    def is_correct(self, answer: str | None, expected_answer: str) -> bool:
        """Whether an extracted answer is right: what the correctness reward and the evaluation's accuracy both ask."""
        return answer is not None and answer == expected_answer


def completion_text(completion: str | list[dict[str, str]]) -> str:
    """The text of a completion as reward functions receive it: a string, or for a chat prompt messages."""
    if isinstance(completion, str):
        return completion
    return "".join(message["content"] for message in completion)
