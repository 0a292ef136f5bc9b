"""Reward functions with scope "batch": one call with all completions of the replica's step, as TRL gives them."""

import os
import time

import pytest

from tests.parts.grading import TaskOf, build_grader, constant, drained, group, groups, logged, rewards
from torchtitan_rl.errors import UserError
from torchtitan_rl.rewards import Grader, RewardError


def calibration(completions, expected_answer, log_metric, **_):
    """The distance of the mean stated confidence from the share of right answers: a number of the whole input."""
    stated = [float(text.split()[1]) for text in completions]
    right = [float(text.split()[0] == answer) for text, answer in zip(completions, expected_answer)]
    error = abs(sum(stated) - sum(right)) / len(completions)
    log_metric("error", error)
    return [-error] * len(completions)


def two_groups():
    """One group all right, the other all wrong, each stating a confidence of one half."""
    wrong = group("1 0.5", "2 0.5", prompt_idx=1, expected_answer="3", text="another")
    return [group("46 0.5", "46 0.5", prompt_idx=0), wrong]


def test_function_that_logs_metrics_gets_the_batch_by_default(build):
    batch = build(calibration)
    assert [rewards(g.samples) for g in batch.grade(two_groups())] == [[0.0, 0.0], [0.0, 0.0]]
    assert logged(batch) == {"extra/calibration/error": (0.0, "mean", 4)}
    alone = build(calibration, scope_of={"calibration": "group"})
    assert [rewards(g.samples) for g in alone.grade(two_groups())] == [[-0.5, -0.5], [-0.5, -0.5]]


def counts(completions, log_extra, **_):
    """The place of each completion in the call."""
    log_extra("pid", [os.getpid()] * len(completions))
    return [float(i) for i in range(len(completions))]


counts.scope = "batch"


def test_scope_attribute_requests_the_batch_and_the_config_overrides_it(build):
    asked = [group("a", "b", prompt_idx=1), group(prompt_idx=5), group("c", prompt_idx=0)]
    scored = build(counts, constant(10.0)).grade(asked)
    assert [g.prompt.prompt_idx for g in scored] == [0, 1, 5]
    assert [rewards(g.samples) for g in scored] == [[10.0], [11.0, 12.0], []]
    assert [g.samples[0].extra["counts/pid"] for g in scored[:2]] != [os.getpid()] * 2
    [first, *_] = build(counts, scope_of={"counts": "group"}).grade(asked)
    assert rewards(first.samples) == [0.0]


def test_batch_has_the_columns_of_all_groups_and_none_for_missing_values(build):
    def sees(completions, prompts, level, finish_reasons, **_):
        return [1.0 if value is None else value for value in level]

    class Levels(TaskOf):
        def train_example(self, index, *, seed):
            import dataclasses

            return dataclasses.replace(super().train_example(index, seed=seed), columns={"level": 3.0})

    graded = build_grader(Grader.Config(scope_of={"sees": "batch"}, in_process=["sees"]), Levels(sees))
    scored = graded.grade([group("a", prompt_idx=0, columns={"level": 3.0}), group("b", "c", prompt_idx=1)])
    graded.close()
    assert [rewards(g.samples) for g in scored] == [[3.0], [1.0, 1.0]]


def hangs(completions, **_):
    time.sleep(30)


def test_batch_has_one_time_limit_and_fails_for_all_completions(build):
    graded = build(hangs, constant(1.0), scope_of={"hangs": "batch"}, time_limit_seconds=0.3, on_failure="none")
    begin = time.monotonic()
    scored = graded.grade(groups(3))
    assert time.monotonic() - begin < 10
    assert [s.reward for g in scored for s in g.samples] == [None] * 3
    assert "longer than 0.3 s" in scored[2].samples[0].extra["error/hangs"]
    metrics = drained(graded)
    assert metrics["reward/hangs/failures"] == (3.0, "sum", 1.0)
    assert metrics["reward/hangs/seconds"].value == 0.3


def test_invalid_score_in_a_batch_names_its_prompt(build):
    def one_bad(completions, **_):
        return [float("nan") if text == "1" else 1.0 for text in completions]

    asked = [group(str(i), prompt_idx=i, text=f"prompt {i}") for i in range(3)]
    config = {"scope_of": {"one_bad": "batch"}}
    with pytest.raises(
        RewardError, match="'one_bad' failed on prompt 'prompt 1' .*: returned nan for completion 0 .'1'"
    ):
        build(one_bad, **config).grade(asked)
    scored = build(one_bad, **config, on_failure="none").grade(asked)
    assert [s.reward for g in scored for s in g.samples] == [1.0, None, 1.0]


def test_mixture_members_have_their_own_functions_and_a_reward_of_the_config_gets_all_in_one_batch(tmp_path):
    file = tmp_path / "all.py"
    file.write_text("def all_of(completions, **_):\n    return [float(len(completions))] * len(completions)\n")

    class Mixture(TaskOf):
        def members(self):
            return {"one": TaskOf(constant(1.0, "own")), "two": TaskOf(counts)}

    config = Grader.Config(rewards=[f"{file}:all_of"], scope_of={"all_of": "batch"}, weights={"own": 2.0})
    graded = build_grader(config, Mixture())
    asked = [group(text, task=task, prompt_idx=i) for i, (text, task) in enumerate(zip("abc", ("two", "one", "two")))]
    samples = [g.samples[0] for g in graded.grade(asked)]
    graded.close()
    found = [sample.reward_breakdown for sample in samples]
    assert found == [{"counts": 0.0, "all_of": 3.0}, {"own": 1.0, "all_of": 3.0}, {"counts": 1.0, "all_of": 3.0}]
    assert rewards(samples) == [3.0, 5.0, 4.0]
    assert sorted(graded.reward_names) == ["all_of", "counts", "own"]


def test_invalid_scope_is_named_before_the_run():
    def odd(completions, **_):
        return [0.0]

    odd.scope = "world"
    with pytest.raises(UserError, match=r"reward function odd.*'world'.*'group' or 'batch'"):
        build_grader(Grader.Config(), TaskOf(odd))
