"""The interface of a task: its examples, and how training and evaluation judge the answers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.config import Configurable

from torchtitan_rl.data.tool_calls import without_thinking
from torchtitan_rl.errors import expect
from torchtitan_rl.fields.field_limits import check_fields
from torchtitan_rl.fields.own_config import OwnConfig
from torchtitan_rl.fields.references import load_function, returned, tried

if TYPE_CHECKING:
    from torchtitan_rl.data.turns import Environment
    from torchtitan_rl.sampling import SamplingConfig
    from torchtitan_rl.types import Prompt

RewardFunction = Callable[..., Any]
"""TRL's signature: takes keywords such as `prompts`, `completions` and columns; returns one float or None per completion."""

Faults = Callable[[Sequence["Example"]], list[str | None]]
"""Returns, for each example, why it cannot be a prompt; None if it can."""

RESERVED_COLUMNS = frozenset(
    ["prompts", "completions", "completion_ids", "logprobs", "loss_masks", "finish_reasons"]
    + ["expected_answer", "turn_rewards", "turn_columns"]
    + ["trainer_state", "log_extra", "log_metric"]
)
"""Keywords that the grader passes to reward functions itself. No data set column may have one of these names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One question, not yet tokenised.

    Example: Example(text="What is 12 + 34?\\n", expected_answer="46", columns={"operands": [12, 34]})
    """

    text: str
    """The prompt as plain text."""
    expected_answer: str
    """A number is converted to text: 46 becomes "46"."""
    messages: list[dict[str, Any]] | None = None
    """The same prompt as chat messages, used instead of `text` with a chat template; None: there are none."""
    is_text: bool = False
    """Whether the data has the prompt as a text: reward functions then get texts, not messages, as in TRL."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas that the chat template describes, in OpenAI's form; None: those of `Task.tools`."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Further columns. A reward function with a parameter of that name receives the column."""
    task: str = ""
    """The name of the mixture member this example comes from; set by the mixture."""
    sampling: "SamplingConfig | None" = None
    """Sampling settings of the mixture member in training; None: the run's."""
    demonstration: list[dict[str, Any]] | None = None
    """The messages that follow the prompt's, to learn from: the assistant's turns. None: completions are sampled."""

    def __post_init__(self) -> None:
        reserved = sorted(RESERVED_COLUMNS.intersection(self.columns))
        others = "names that the grader does not give itself"
        expect(not reserved, "Example.columns", reserved, others, "Rename these columns.")
        expected = "a list of one or more dicts with a role, or None for a prompt of text alone"
        remedy = "Give the first message here; what an environment's reset() returns follows it."
        holds = self.messages is None or _are_messages(self.messages)
        expect(holds, "Example.messages", self.messages, expected, remedy)
        expected, remedy = "a text or a number", "Use '' where there is none."
        is_given = self.expected_answer is not None
        expect(is_given, "Example.expected_answer", self.expected_answer, expected, remedy)
        object.__setattr__(self, "expected_answer", str(self.expected_answer))


def _are_messages(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, dict) and isinstance(item.get("role"), str) for item in value)


class Task(OwnConfig, ABC):
    """Examples and the judgement of answers. Stateless: every method is a pure function of the config and its arguments.

    Subclass it, with a nested Config for its settings, and set `RunConfig.task` to that Config. docs/rewards.md has a
    complete example.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        warm_start: str = ""
        """A function that returns the recipe of a small start policy, used if hf_assets_path is empty
        (package.module:function or path/to/file.py:function). Empty: hf_assets_path is required."""

        def start_checkpoint(self, cache_root: Path) -> Path | None:
            """The folder of a checkpoint made by the task, used if the run names none; None: the task makes none.

            Called on every rank before the process group starts. Such folders are kept under `cache_root`.
            """
            return None

        def check_files(self) -> None:
            """Raise UserError for what is wrong with the data and takes less than a second to see, such as a file's name.

            Called before ranks are started.
            """

        def samplings(self) -> dict[str, "SamplingConfig"]:
            """Sampling settings that belong to members of the task, keyed by config field."""
            return {}

    @abstractmethod
    def train_example(self, index: int, *, seed: int) -> Example:
        """The training example at `index` (0, 1, 2, ..., endless) of the stream with this seed.

        Random access makes a run resumable: the position in the data is one integer. With a finite data set of N rows,
        shuffle the rows by (seed, index // N) and take row index % N.
        """

    @abstractmethod
    def held_out_examples(self, num: int) -> list[Example]:
        """The first `num` examples of a fixed list that is disjoint from the training examples of every seed.

        Raises UserError if there are fewer.
        """

    @abstractmethod
    def reward_functions(self) -> Sequence[RewardFunction]:
        """The functions that score completions, in TRL's signature. Tables show them by `__name__`."""

    @abstractmethod
    def extract_answer(self, text: str) -> str | None:
        """The answer in a completion's text, in canonical form; None if there is none. `answer` calls it."""

    def answer(self, completion: str | list[dict[str, str]]) -> str | None:
        """The answer that `extract_answer` finds in a completion after its thinking: in "" if it was cut off while thinking."""
        return self.extract_answer(without_thinking(completion_text(completion)))

    def is_correct(self, answer: str | None, expected_answer: str) -> bool:
        """Whether an extracted answer is correct. The correctness reward and the evaluation's accuracy use this."""
        return answer is not None and answer == expected_answer

    def judge(self, answer: str | None, prompt: "Prompt") -> bool | None:
        """Whether an extracted answer to `prompt` is correct; None if the prompt has nothing to judge it by.

        By default `is_correct` compares it with the expected answer. Override this method if other columns decide.
        """
        return self.is_correct(answer, prompt.expected_answer)

    def shown_answer(self, answer: str, prompt: "Prompt") -> str:
        """The part of an extracted answer that tables show: that which `judge` compares."""
        return answer

    def answer_request(self, prompt: str) -> str:
        """Text to add to a prompt that does not ask for the form in which answers are read; "" if there is nothing to ask for."""
        return ""

    def epoch(self, num_seen: int) -> float | None:
        """Passes over the training examples after `num_seen` of them; None: they never repeat."""
        return None

    def leave_out(self, faults: "Faults") -> None:
        """Drop the examples that cannot be prompts, for example because they have too many tokens, and report them.

        The prompt stream calls it once before training. A task without a fixed list does nothing: the stream skips and
        counts its faulty examples as they come.

        Args:
            faults: returns a reason for each example, such as "without an answer", or None.
                One call with many examples is faster than many calls.
        """

    def rehearse(self) -> Iterator[str]:
        """Yields the lines that --dry-run shows of known answers, in place of rewards of answers to the first prompt."""
        yield from ()

    def members(self) -> dict[str, "Task"]:
        """The tasks that examples come from, by `Example.task`: this task, or the members of a mixture.

        Each one scores and judges the completions of its own examples.
        """
        return {"": self}

    def tools(self) -> Sequence[Callable[..., Any]]:
        """Functions that the policy may call, in worker processes. Each has type hints and a docstring that describes its arguments."""
        return ()

    def environment(self, prompt: "Prompt", *, seed: int = 0) -> "Environment | None":
        """A new environment, which answers one sample of the prompt between its turns.

        None: the calls of `tools` are answered; without tools the conversation has one turn.

        Called in the conversation's own thread, beside others.

        Args:
            seed: for random answers, such as dice. It is made of (run seed, step, prompt, sample), so it differs between
                samples and is the same when the run is repeated. A method without this parameter is called without it.
        """
        return None


def build_task(config: Task.Config) -> Task:
    """Build the task. Raises UserError if a method of a user's task raises, or gives no examples or other ones at each call."""
    task = tried(config, "build")
    for member in dict.fromkeys(tried(task, "members").values()):
        _check_examples(member)
    return task


def _check_examples(member: Task) -> None:
    name = type(member).__name__
    example = tried(member, "train_example", 0, seed=0)
    is_one = isinstance(example, Example)
    expect(is_one, f"{name}.train_example(0)", example, "an Example", "Return one.")
    again = tried(member, "train_example", 0, seed=0)
    shown = [(each.text, each.messages, each.expected_answer) for each in (example, again)]
    expected = "the same example at every call with one index and seed"
    remedy = 'Draw chance from random.Random(f"{seed}/{index}"): ranks and resumed runs ask again.'
    expect(shown[0] == shown[1], f"{name}.train_example(0)", example.text[:80], expected, remedy)
    held_out = tried(member, "held_out_examples", 1)
    expected = "a list with an Example"
    expect(bool(held_out), f"{name}.held_out_examples(1)", held_out, expected, "Return one.")


class StartRecipe(ABC):
    """How a small start policy, or a small teacher, is made: what the function returns that `task.warm_start` or `teacher` names."""

    @abstractmethod
    def checkpoint(self, task: Task, cache_root: Path) -> Path:
        """The folder of the checkpoint for a task, under `cache_root`, which is made first if it is missing.

        Every rank calls it, and it returns on each when the folder is complete.
        """


def start_of(task: Task.Config, cache_root: Path) -> Path | None:
    """The start checkpoint of a task, for a run without hf_assets_path; None if the task has none.

    Its warm_start recipe makes it, or without a recipe the task's own start_checkpoint.
    """
    if not task.warm_start:
        return task.start_checkpoint(cache_root)
    return recipe_of(task.warm_start, "task.warm_start").checkpoint(task.build(), cache_root)


def recipe_of(reference: str, field: str) -> StartRecipe:
    """The recipe that a function makes. Raises UserError, naming `field`, if there is no such function or recipe."""
    function = load_function(reference, field)
    expected = "a function that returns a Recipe"
    recipe = returned(function, field, reference, expected, StartRecipe)
    check_fields(recipe, field)
    return recipe


class OpenedText(str):
    """What the policy wrote in a turn that began inside a block of thinking: the prompt ended with the tag `opened`."""

    opened = ""


def completion_text(completion: str | list[dict[str, str]]) -> str:
    """The policy's text in a completion as reward functions receive it: a string, or messages for a chat prompt.

    With the tag in front by which the prompt opened the thinking, so that what is thought is told from the answer.
    """
    if isinstance(completion, OpenedText):
        return f"{completion.opened}{completion}"
    if isinstance(completion, str):
        return completion
    turns = [message["content"] for message in completion if message["role"] == "assistant"]
    return "\n".join(map(completion_text, turns))


def may_answer(task: Task) -> bool:
    """Whether the task has tools or a method `environment` of its own, which may still return None for a prompt."""
    return type(task).environment is not Task.environment or bool(task.tools())


def shared_out(num: int, among: int) -> list[int]:
    """`num` split into `among` shares that differ by at most 1. Example: shared_out(8, 3) == [3, 3, 2]."""
    return [num // among + (i < num % among) for i in range(among)]


def check_metric_name(name: str, field: str) -> None:
    """Raise UserError if `name` cannot be part of a metric's name, evaluation/<name>/..."""
    is_valid = bool(name) and "/" not in name and name != "sampled"
    expected = "a name without /, other than sampled, by which metrics go"
    expect(is_valid, field, name, expected, "Choose another.")
