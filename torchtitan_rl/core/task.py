"""What a task is: examples to ask about, and one judgement of the answers, used by training and evaluation alike."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.config import Configurable

from torchtitan_rl.core.config import OwnConfig
from torchtitan_rl.core.errors import expect

if TYPE_CHECKING:
    from torchtitan_rl.core.generator import SamplingConfig
    from torchtitan_rl.core.generator.environment import Environment
    from torchtitan_rl.core.types import Prompt

RewardFunction = Callable[..., Any]
"""TRL's: keywords such as `prompts`, `completions` and columns in, one float or None a completion out."""
Faults = Callable[[Sequence["Example"]], list[str | None]]
"""What is wrong with each of several examples as prompts; None for nothing."""

RESERVED_COLUMNS = frozenset(
    ["prompts", "completions", "completion_ids", "logprobs", "loss_masks", "finish_reasons", "expected_answer"]
    + ["turn_rewards", "trainer_state", "log_extra", "log_metric"]
)
"""Keywords that the grader itself hands to reward functions, so no data set column may be named so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One question before it meets a tokenizer.

    Example: Example(text="What is 12 + 34?\\n", expected_answer="46", columns={"operands": [12, 34]})
    """

    text: str
    """The prompt as plain text."""
    expected_answer: str
    """A number becomes its text: 46 is "46"."""
    messages: list[dict[str, str]] | None = None
    """The same prompt as chat messages, used instead of `text` where a chat template is applied; None: no such form."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Further columns, handed by name to the reward functions that name them."""
    task: str = ""
    """The member of a mixture that asks; the mixture fills it in."""
    sampling: "SamplingConfig | None" = None
    """How a mixture's member is sampled in training; None: as the run is."""

    def __post_init__(self) -> None:
        answer, clash = self.expected_answer, sorted(RESERVED_COLUMNS & self.columns.keys())
        if isinstance(answer, Real) and not isinstance(answer, bool):
            object.__setattr__(self, "expected_answer", str(answer))
        for name in ("text", "expected_answer"):
            value = getattr(self, name)
            expect(isinstance(value, str), f"Example.{name}", value, "a text", "Let the task convert it.")
        expect(
            not clash, "Example.columns", clash, "names that the grader does not give itself", "Rename these columns."
        )


class Task(OwnConfig, ABC):
    """Examples and their judgement. Stateless: every method is a pure function of the config and its arguments.

    Subclass it with these methods, and a nested Config where it has settings, and put that Config into `RunConfig.task`;
    docs/rewards.md has a complete one.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        warm_start: str = ""
        """Where hf_assets_path is empty, the run makes the small policy that it starts from: by the recipe that this function
        returns (package.module:function or path/to/file.py:function). Empty: hf_assets_path must name one."""

        def start_checkpoint(self, cache_root: Path) -> Path | None:
            """A folder of the task's own making that the policy starts from when the run names none; None: there is none.

            Called on every rank before the process group starts; `cache_root` is where such folders are kept.
            """
            return None

        def samplings(self) -> dict[str, "SamplingConfig"]:
            """The sampling settings that the task's members have of their own, by the field that holds them."""
            return {}

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

    def judge(self, answer: str | None, prompt: "Prompt") -> bool | None:
        """Whether an extracted answer to `prompt` is right; None where there is nothing to judge by.

        `is_correct` says it from the expected answer. Override this one where the prompt's columns decide.
        """
        return self.is_correct(answer, prompt.expected_answer)

    def epoch(self, num_seen: int) -> float | None:
        """Rounds through the training examples after the first `num_seen` of the stream; None: they never repeat."""
        return None

    def leave_out(self, faults: "Faults") -> None:
        """Leave out the examples that have a fault as prompts, such as too many tokens, and say which.

        Called once before training, by a stream that knows the tokenizer. A task without a fixed list does nothing: its
        faulty examples are passed over when they come, and counted.

        Args:
            faults: gives each example's reason, such as "longer than prompts.max_prompt_tokens 512"; None for a good one.
                Many at once are quicker than one by one.
        """

    def members(self) -> dict[str, "Task"]:
        """The tasks that examples come from, by `Example.task`: itself alone, or what a mixture mixes.

        Each scores and judges the completions of its own examples: reward functions, extract_answer, is_correct.
        """
        return {"": self}

    def tools(self) -> Sequence[Callable[..., Any]]:
        """Functions that the policy may call, with type hints and a docstring that describes each argument."""
        return ()

    def environment(self, prompt: "Prompt") -> "Environment | None":
        """What answers one sample of the prompt between its turns, a new one at each call.

        None: an environment that answers calls of `tools`, or, where there are none, nothing: the first turn is the last.
        """
        return None


def completion_text(completion: str | list[dict[str, str]]) -> str:
    """What the policy said, of a completion as reward functions receive it: a string, or for a chat prompt messages."""
    if isinstance(completion, str):
        return completion
    return "\n".join(message["content"] for message in completion if message["role"] == "assistant")


def shared_out(num: int, among: int) -> list[int]:
    """As equal shares as can be. Example: shared_out(8, 3) == [3, 3, 2]."""
    return [num // among + (i < num % among) for i in range(among)]


def check_metric_name(name: str, field: str) -> None:
    """Raise UserError for a name of examples that no metric evaluation/<name>/... can go by."""
    holds = bool(name) and "/" not in name and name != "sampled"
    expect(holds, field, name, "a name without /, other than sampled, by which metrics go", "Choose another.")
