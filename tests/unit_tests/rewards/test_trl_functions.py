"""TRL's reward functions run unchanged: the six that it publishes, and twelve in the ways that its documentation shows."""

import asyncio
import re

import pytest

from tests.parts.grading import TaskOf, group, logged, score
from torchtitan_rl.rewards import Grader
from torchtitan_rl.rewards.build_grader import build_grader
from torchtitan_rl.rewards.reward import Reward
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


def by_characters(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def unique_characters(prompts, completions, **kwargs):
    return [len(set(c)) for c in completions]


def chat_format(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think>", content, re.DOTALL) else 0.0 for content in contents]


def boxed_truth(completions, ground_truth, **kwargs):
    found = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    return [1.0 if f and f.group(1) == truth else 0.0 for f, truth in zip(found, ground_truth)]


def math_only(prompts, completions, task, **kwargs):
    return [1.0 if t == "math" else None for t in task]


def code_only(prompts, completions, task, **kwargs):
    return [1.0 if t == "code" else None for t in task]


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


def calibrated(completions, ground_truth, log_metric=None, **kwargs):
    """The Brier reward of a stated confidence. The expected calibration error, in ten bins, is one of the batch."""
    stated = [float(c.split()[1]) for c in completions]
    right = [float(c.split()[0] == truth) for c, truth in zip(completions, ground_truth)]
    error = 0.0
    for place in range(10):
        inside = [i for i, s in enumerate(stated) if min(int(s * 10), 9) == place]
        error += abs(sum(stated[i] - right[i] for i in inside)) / len(stated)
    log_metric("ece", error)
    return [1 - (s - r) ** 2 for s, r in zip(stated, right)]


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
        (by_characters, PLAIN, [11.0, 2.0]),
        (unique_characters, PLAIN, [11.0, 2.0]),
        (chat_format, CHAT, [0.0, 0.0]),
        (boxed_truth, PLAIN, [1.0, 0.0]),
        (math_only, PLAIN, [1.0, 1.0]),
        (code_only, PLAIN, [None, None]),
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


def test_calibration_error_is_computed_over_the_batch_as_in_trl():
    """Two prompts, right and wrong, both stated with 0.5: perfect over the batch, 0.5 within each group."""
    graded = build_grader(Grader.Config(), WithColumns(calibrated))
    asked = [group("46 0.5", prompt_idx=0, **PLAIN), group("45 0.5", prompt_idx=1, **PLAIN)]
    found = [s.reward for g in graded.grade(asked) for s in g.samples]
    assert found == [0.75, 0.75]
    assert logged(graded) == {"extra/calibrated/ece": (0.0, "mean", 2)}
    graded.close()
    alone = build_grader(Grader.Config(scope_of={"calibrated": "group"}), WithColumns(calibrated))
    alone.grade(asked)
    assert logged(alone) == {"extra/calibrated/ece": (0.5, "mean", 2)}
    alone.close()


@pytest.mark.parametrize(
    ("function", "prompt", "said"),
    [
        (chat_format, PLAIN, "; completions are texts here, as the prompts have no messages"),
        (lambda completions: [re.match("a", c) and 1.0 for c in completions], CHAT, "completion_text(completion) is"),
        (
            lambda completions: [float(c.strip() == "46") for c in completions],
            CHAT,
            "completion_text(completion) is their text",
        ),
    ],
)
def test_a_function_that_expects_the_other_form_of_completions_is_told_which_it_gets(function, prompt, said):
    result = Reward(name="mine", function=function).run([group("46", **prompt)], TrainerState())
    assert said in result.errors[0]
    fails = Reward(name="fails", function=lambda completions: [{}["x"] for _ in completions])
    assert "; completions are" not in fails.run([group("46", **prompt)], TrainerState()).errors[0]
