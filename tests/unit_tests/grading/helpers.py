"""Graders over given functions, and the prompts and groups they score."""

from torchtitan_rl.grading import Grader
from torchtitan_rl.tasks import SumDigits
from torchtitan_rl.types import Completion, Prompt


class TaskOf(SumDigits):
    """sum_digits with other reward functions."""

    def __init__(self, *functions):
        super().__init__(SumDigits.Config(max_integers=2))
        self.functions = functions

    def reward_functions(self):
        return self.functions


def grader(*functions, **config) -> Grader:
    return Grader.Config(**config).build(task=TaskOf(*functions))


def prompt(**fields) -> Prompt:
    defaults = {"prompt_idx": 3, "text": "What is 12 + 34?\n", "token_ids": [7, 8], "expected_answer": "46"}
    return Prompt(**{**defaults, **fields})


def group(*texts: str, prompt_idx: int = 3) -> list[Completion]:
    return [
        Completion(
            policy_version=0,
            prompt_idx=prompt_idx,
            sample_idx=index,
            prompt_token_ids=[7, 8],
            text=text,
            token_ids=list(range(len(text))),
            token_logprobs=[-0.5] * len(text),
            finish_reason="stop",
        )
        for index, text in enumerate(texts)
    ]


def rewards(scored):
    return [s.reward for s in scored]


def constant(value, name="constant"):
    def function(completions, **_):
        return [value for _ in completions]

    function.__name__ = name
    return function


def length(completions, **_):
    return [float(len(completion)) for completion in completions]
