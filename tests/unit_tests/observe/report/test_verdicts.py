"""The lines of words: each says what its numbers say, and none is made up."""

from pathlib import Path

import pytest

from torchtitan_rl.observe.report import Run
from torchtitan_rl.observe.report.ending import ending
from torchtitan_rl.observe.report.load import End, Warned
from torchtitan_rl.observe.report.verdicts import verdicts


def run_of(series=None, *, steps=20, rows=(), **config):
    """A run with these series at steps 1 to `steps`."""
    return Run(
        name="a", folder=Path("a"), steps=list(range(1, steps + 1)), times=[2.0 * s for s in range(steps)],
        series=series or {}, rows=list(rows), config={"num_steps": steps, **config},
    )  # fmt: skip


def line(run, word):
    """The one verdict that holds the word."""
    found = [v for v in verdicts(run) if word in v.text]
    assert len(found) == 1, verdicts(run)
    return found[0]


RISING = [0.4 + 0.04 * s for s in range(20)]


def test_a_reward_that_rises_is_good_and_one_that_falls_is_bad():
    up, down = run_of({"reward/mean": RISING}), run_of({"reward/mean": RISING[::-1]})
    assert line(up, "reward").level == "good"
    assert "rose from 0.42 to 1.14 in 20 steps" in line(up, "reward").text
    assert line(down, "reward").level == "bad"
    assert "fell" in line(down, "reward").text
    assert "best 1.16 at step 1" in line(down, "reward").text


def test_held_out_accuracy_has_the_interval_of_its_prompts():
    known = {"": [0.617, 0.996], "_low": [0.556, 0.978], "_high": [0.674, 0.999]}
    series = {f"evaluation/accuracy{end}": [first, *[None] * 18, last] for end, (first, last) in known.items()}
    found = line(run_of(series, evaluation={"num_prompts": 256}), "held-out")
    assert "61.7 → 99.6 % (95 % interval 97.8 to 99.9, 256 prompts)" in found.text
    assert found.level == "plain"  # without the rows there is no test


def test_a_run_without_a_learning_signal_says_why_as_its_log_does():
    said = "no learning signal for 3 steps: every advantage is 0. No completion is correct: use easier prompts."
    run = run_of()
    logged = f"torchtitan_rl.observe.metrics.idle: {said}"
    run.warnings = [Warned(logged.replace("3 steps", "1 step"), "WARNING", "10:00"), Warned(logged, "WARNING", "10:05")]
    assert line(run, "no learning signal") == ("warn", said, "groups/zero_variance_fraction")


def test_what_a_teacher_and_demonstrations_lower_is_good_when_it_falls():
    falling = RISING[::-1]
    found = line(run_of({"teacher/divergence": falling}), "teacher")
    assert (found.level, found.text[:50]) == ("good", "divergence from the teacher 1.14 → 0.42 nats per t")
    assert line(run_of({"evaluation/loss": [2.0, *[None] * 18, 1.5]}), "held-out loss").level == "plain"  # two points
    assert line(run_of({"evaluation/loss": RISING}), "held-out loss").level == "bad"


def test_groups_without_signal_and_lost_time_are_shares():
    times = {"time/step": [2.0] * 20, "time/train": [1.76] * 20, "time/unaccounted": [0.24] * 20}
    run = run_of({"groups/zero_variance_fraction": [0.31] * 20, **times})
    assert line(run, "groups").text.startswith("31 % of groups gave no signal")
    assert line(run, "unaccounted").text == "12.0 % of step time is unaccounted for"
    assert line(run, "unaccounted").level == "warn"


def test_the_sampler_is_held_to_the_gate_of_the_config():
    series = {"sampler/logprob_diff/max": [1e-5] * 19 + [3e-5]}
    assert "differ by at most 3.0e-05 nats (step 20)" in line(run_of(series), "differ").text
    gated = run_of(series, trainer={"logprob_gate": {"max_diff": 1e-5}})
    assert line(gated, "differ").level == "warn"


def test_failures_and_numbers_that_are_not_finite_are_bad():
    run = run_of({"reward/mine/failures": [0.0] * 19 + [3.0], "nonfinite/tokens": [0.0, 2.0] + [0.0] * 18})
    run.warnings = [Warned("sink died", "ERROR", "12:00", 2)]
    assert line(run, "mine failed for 3 completions").level == "bad"
    assert line(run, "not finite").level == "bad"
    assert line(run, "2 errors in the log").level == "bad"


TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 3, in main
    reward(1)
  File "/home/me/mine.py", line 7, in reward
    return 1 / 0
           ~~^~~
ZeroDivisionError: division by zero
The last line of your own code in it: /home/me/mine.py, line 7
"""


def test_a_failed_run_says_where_and_with_which_error():
    run = run_of({}, num_steps=50)
    run.end = End(outcome="failed", message=TRACEBACK, rank=1, phase="step 21: grade")
    found = ending(run)
    assert found["text"].startswith("Failed in step 21, grade (rank 1): 20 of 50 steps")
    assert found["error"].startswith("ZeroDivisionError: division by zero\nThe last line of your own code")
    assert found["details"] == TRACEBACK
    assert found["level"] == "bad"


def test_a_run_that_stopped_itself_is_bad_and_one_stopped_by_a_signal_is_a_warning():
    run = run_of({}, num_steps=50)
    run.end = End(outcome="stopped", message="stopped: the log-probs differ", phase="step 21: train")
    assert ending(run)["level"] == "bad"
    assert ending(run)["error"] == "the log-probs differ"
    run.end = End(outcome="stopped", message="SIGINT after step 20; start again with ...")
    assert ending(run)["level"] == "warn"


def held_out(step, right, n=64):
    return [
        {"split": "eval_greedy", "step": step, "prompt_idx": i, "prompt": f"p{i}", "response": "r", "correct": right(i)}
        for i in range(n)
    ]


def test_accuracies_of_the_same_prompts_are_compared_in_pairs():
    series = {"evaluation/accuracy": [40 / 64, *[None] * 18, 48 / 64]}
    few_flip = [*held_out(1, lambda i: i < 40), *held_out(20, lambda i: i < 48)]
    found = line(run_of(series, rows=few_flip, evaluation={"num_prompts": 64}), "held-out")
    assert found.level == "good"  # without the pairs it may be chance: p = 0.18
    assert "8 prompts became right, 0 wrong" in found.text
    many_flip = [*held_out(1, lambda i: i < 40), *held_out(20, lambda i: i >= 16)]
    found = line(run_of(series, rows=many_flip, evaluation={"num_prompts": 64}), "held-out")
    assert found.level == "plain"
    assert "24 prompts became right, 16 wrong; the difference may be chance" in found.text


@pytest.mark.parametrize(
    "loss", ["torchtitan_rl.algorithm.losses.sft:Nll", "torchtitan_rl.algorithm.losses.distillation:ExactDistill"]
)
def test_a_run_whose_loss_reads_no_reward_is_not_judged_by_rewards(loss):
    run = run_of(
        {"reward/mean": [1.2] * 20, "groups/zero_variance_fraction": [1.0] * 20}, algorithm={"loss": {"class": loss}}
    )
    assert [(one.level, one.text) for one in verdicts(run)] == [
        ("plain", "reward 1.2 → 1.2 (means of the first and last 2 steps); the loss does not read it")
    ]
