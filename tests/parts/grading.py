"""Graders over given functions, and the prompts and groups they score."""

from collections import defaultdict

from torchtitan_rl.configs.toys.sum_digits import SumDigits
from torchtitan_rl.data.task import Task
from torchtitan_rl.rewards import Grader
from torchtitan_rl.rewards.find_scorers import find_scorers
from torchtitan_rl.types import Completion, Group, Metric, Prompt, ScoredCompletion


class TaskOf(SumDigits):
    """sum_digits with other reward functions."""

    def __init__(self, *functions):
        super().__init__(SumDigits.Config(max_integers=2))
        self.functions = functions

    def reward_functions(self):
        return self.functions


def build_grader(config: Grader.Config, task: Task) -> Grader:
    return config.build(scorers=find_scorers(config, task))


def grader(*functions, **config) -> Grader:
    """Of these functions, in a worker; those named by `in_process` see what the test sees."""
    return build_grader(Grader.Config(**config), TaskOf(*functions))


def group(*texts: str, prompt: Prompt | None = None, **fields) -> Group[Completion]:
    """The texts as completions of `prompt`, or of one with these fields; a token for each character."""
    defaults = {"prompt_idx": 3, "text": "What is 12 + 34?\n", "token_ids": [7, 8], "expected_answer": "46"}
    samples = [
        Completion(
            policy_version=0,
            sample_idx=index,
            text=text,
            token_ids=range(len(text)),
            sampler_logprobs=[-0.5] * len(text),
            finish_reason="stop",
        )
        for index, text in enumerate(texts)
    ]
    return Group(prompt=prompt or Prompt(**{**defaults, **fields}), samples=samples)


def groups(number: int) -> list[Group[Completion]]:
    """Of one completion each: its prompt's number."""
    return [group(str(i), prompt_idx=i) for i in range(number)]


def score(grader: Grader, *texts: str, **fields) -> list[ScoredCompletion]:
    """The grader's view of one group."""
    [scored] = grader.grade([group(*texts, **fields)])
    return scored.samples


def rewards(scored):
    return [s.reward for s in scored]


def constant(value, name="constant"):
    def function(completions, **_):
        return [value for _ in completions]

    function.__name__ = name
    return function


def length(completions, **_):
    return [float(len(completion)) for completion in completions]


def drained(grader: Grader) -> dict[str, Metric]:
    """Returns the grader's metrics, each merged over its calls as the recorder merges them."""
    calls: dict[str, list[Metric]] = defaultdict(list)
    for key, metric in grader.drain_metrics():
        calls[key].append(metric)
    merged = {}
    for key, metrics in calls.items():
        if metrics[0].reduction == "sum":
            merged[key] = Metric(sum(one.value for one in metrics), "sum")
        else:
            weight = sum(one.weight for one in metrics)
            merged[key] = Metric(sum(one.value * one.weight for one in metrics) / weight, "mean", weight)
    return merged


def logged(grader: Grader) -> dict[str, Metric]:
    """Returns `drained` without the durations of calls."""
    return {key: metric for key, metric in drained(grader).items() if not key.endswith("/seconds")}
