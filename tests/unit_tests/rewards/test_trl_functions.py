"""TRL's reward functions run unchanged: the six that it publishes, and eight in the ways that its documentation shows."""

import asyncio
import re

import pytest

from tests.parts.grading import TaskOf, build_grader, group, score
from torchtitan_rl.rewards import Grader
from torchtitan_rl.rewards.trainer_state import TrainerState

PUBLISHED = {
    "trl.rewards:accuracy_reward": [1.0, 0.0],
    "trl.rewards:reasoning_accuracy_reward": [1.0, 0.0],
    "trl.rewards:think_format_reward": [1.0, 0.0],
    "trl.rewards:get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=10)": [
        -1.0,
        pytest.approx(-0.1),
    ],
    "trl.rewards:get_repetition_penalty_reward(ngram_size=2)": [0.0, 0.0],
    "trl.rewards:get_cosine_scaled_reward(max_len=100)": None,
}


class WithColumns(TaskOf):
    def train_example(self, index, *, seed):
        import dataclasses

        return dataclasses.replace(super().train_example(index, seed=seed), columns=dict(COLUMNS))


COLUMNS = {"solution": "$46$", "ground_truth": "46", "task": "math"}
CHAT = {"messages": [{"role": "user", "content": "12 + 34?"}], "columns": COLUMNS}
PLAIN = {"columns": COLUMNS}


def by_tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def unique_characters(prompts, completions, **kwargs):
    return [len(set(c)) for c in completions]


def chat_format(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think>", content, re.DOTALL) else 0.0 for content in contents]


def boxed_truth(completions, ground_truth, **kwargs):
    found = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    return [1.0 if f and f.group(1) == truth else 0.0 for f, truth in zip(found, ground_truth)]


async def waits(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 if completion else 0.0 for completion in completions]


def logs_lists(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):
    right = [float(truth in completion) for completion, truth in zip(completions, ground_truth)]
    if log_extra:
        log_extra("golden_answer", list(ground_truth))
    if log_metric:
        log_metric("accuracy", sum(right) / len(right))
    return right


def logs_one_by_one(completions, log_extra=None, **kwargs):
    for completion in completions:
        log_extra("length", [len(completion)])
    return [0.0] * len(completions)


def curriculum(completions, trainer_state, **kwargs):
    progress = trainer_state.global_step / max(1, trainer_state.max_steps)
    late = trainer_state.best_metric is not None and trainer_state.num_input_tokens_seen > 0
    return [progress + late + trainer_state.num_train_epochs for _ in completions]


@pytest.mark.parametrize(("reference", "expected"), PUBLISHED.items())
def test_published_trl_function_runs_unchanged(reference, expected):
    graded = build_grader(Grader.Config(rewards=[reference], time_limit_seconds=600.0), WithColumns())
    found = [
        s.reward for s in score(graded, r"<think>" + "\n40+6\n</think>\n" + r"$\boxed{46}$", "<b> 45 $45$", **CHAT)
    ]
    graded.close()
    assert found == (expected or [pytest.approx(0.96, abs=0.1), pytest.approx(-0.5, abs=0.5)])


@pytest.mark.parametrize(
    ("function", "fields", "expected"),
    [
        (by_tokens, PLAIN, [11.0, 2.0]),
        (unique_characters, PLAIN, [11.0, 2.0]),
        (chat_format, CHAT, [0.0, 0.0]),
        (boxed_truth, PLAIN, [1.0, 0.0]),
        (waits, PLAIN, [1.0, 1.0]),
        (logs_lists, PLAIN, [1.0, 0.0]),
        (logs_one_by_one, PLAIN, [0.0, 0.0]),
        (curriculum, PLAIN, [1.5, 1.5]),
    ],
)
def test_an_example_of_the_documentation_runs_unchanged(function, fields, expected):
    graded = build_grader(Grader.Config(), WithColumns(function))
    state = TrainerState(global_step=5, max_steps=10, best_metric=0.3, num_input_tokens_seen=9)
    [scored] = graded.grade([group(r"$\boxed{46}", "45", **fields)], state=state)
    graded.close()
    assert [s.reward for s in scored.samples] == expected
    if function is logs_one_by_one:
        assert [s.extra["logs_one_by_one/length"] for s in scored.samples] == [11, 2]
