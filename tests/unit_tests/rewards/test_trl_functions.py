"""TRL's reward functions run unchanged: the six that it publishes, and two as its documentation shows them."""

import pytest

from tests.parts.grading import TaskOf, build_grader, group, score
from torchtitan_rl.rewards import Grader
from torchtitan_rl.rewards.trainer_state import TrainerState

PUBLISHED = {
    "trl.rewards:accuracy_reward": [1.0, 0.0],
    "trl.rewards:reasoning_accuracy_reward": [1.0, 0.0],
    "trl.rewards:think_format_reward": [1.0, 0.0],
    "trl.rewards:get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=10)": [-1, pytest.approx(-0.1)],
    "trl.rewards:get_repetition_penalty_reward(ngram_size=2)": [0.0, 0.0],
    "trl.rewards:get_cosine_scaled_reward(max_len=100)": None,
}


class WithColumns(TaskOf):
    def train_example(self, index, *, seed):
        import dataclasses

        return dataclasses.replace(super().train_example(index, seed=seed), columns=dict(COLUMNS))


COLUMNS = {"solution": "$46$", "ground_truth": "46", "task": "math"}
CHAT = {"messages": [{"role": "user", "content": "12 + 34?"}], "columns": COLUMNS}


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


def test_examples_of_the_documentation_run_unchanged():
    graded = build_grader(Grader.Config(), WithColumns(logs_one_by_one, curriculum))
    state = TrainerState(global_step=5, max_steps=10, best_metric=0.3, num_input_tokens_seen=9)
    [scored] = graded.grade([group(r"$\boxed{46}", "45", columns=COLUMNS)], state=state)
    graded.close()
    assert [s.reward for s in scored.samples] == [1.5, 1.5]
    assert [s.extra["logs_one_by_one/length"] for s in scored.samples] == [11, 2]
