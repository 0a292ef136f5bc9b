"""The overview in words: each line says what its numbers say, and none is made up."""

from pathlib import Path

from torchtitan_rl.observe.report import Run
from torchtitan_rl.observe.report.overview import asked, ending, lines


def run_of(series=None, end=None, num_steps=20):
    steps = list(range(1, 21))
    config = {"num_steps": num_steps}
    return Run(name="a", folder=Path("a"), steps=steps, series=series or {}, config=config, end=end or {})


def line(run, word):
    """The one line that holds the word."""
    found = [line for line in lines(run) if word in line.text]
    assert len(found) == 1, lines(run)
    return found[0]


def test_changes_are_the_means_of_the_first_and_the_last_tenth():
    rising = [0.4 + 0.04 * s for s in range(20)]
    losses = [2.0, *[None] * 18, 1.5]
    run = run_of({"reward/mean": rising, "teacher/divergence": rising[::-1], "evaluation/loss": losses})
    assert line(run, "reward") == ("plain", "reward 0.42 → 1.14", "reward/mean")
    assert line(run, "teacher").text == "divergence from the teacher 1.14 → 0.42 nats per token"
    assert line(run, "held-out loss").text == "held-out loss 2 → 1.5 nats per token"


def test_held_out_accuracy_has_its_interval_and_the_best_step():
    known = {"": [0.617, 0.996, 0.9], "_low": [0.556, 0.978, 0.86], "_high": [0.674, 0.999, 0.93]}
    series = {
        f"evaluation/accuracy{end}": [first, *[None] * 17, best, last] for end, (first, best, last) in known.items()
    }
    expected = "held-out accuracy 61.7 → 90.0 % (95 % interval 86.0 to 93.0); best 99.6 % at step 19"
    assert line(run_of(series), "held-out").text == expected


def test_the_parts_of_a_step_s_time_are_shares():
    shares = {"train": 0.75, "generate": 0.05, "other": 0.2, "grade": 0.0}
    run = run_of({f"share/{part}": [share] * 20 for part, share in shares.items()})
    assert line(run, "time").text == "time of a step: train 75 %, other 20 %, generate 5 %"


def test_failures_and_numbers_that_are_not_finite_are_bad():
    run = run_of({"reward/mine/failures": [0.0] * 19 + [3.0], "nonfinite/tokens": [0.0, 2.0] + [0.0] * 18})
    run.warnings = [{"text": "sink died", "level": "ERROR", "first": "12:00", "count": 2}]
    assert line(run, "reward/mine/failures: 3 in all steps").level == "bad"
    assert line(run, "nonfinite/tokens: 2 in all steps").level == "bad"
    assert line(run, "2 errors in the log").level == "bad"


def test_steps_without_a_signal_and_many_cut_completions_are_warned_of():
    run = run_of({"groups/zero_variance_fraction": [1.0] * 3 + [0.5] * 17, "completions/clipped_fraction": [0.3] * 20})
    assert line(run, "nothing to learn from in 3 of 20 steps").level == "warn"
    assert line(run, "30 % of the last completions were cut at a limit").level == "warn"
    run.config["sampling"] = {"n": 1}  # without siblings nothing is compared
    assert [line.key for line in lines(run)] == ["completions/clipped_fraction"]


def test_what_was_asked_is_a_sentence():
    run = run_of({f"reward/{name}/mean": [0.0] * 20 for name in ("correct", "format")})
    run.config |= {
        "hf_assets_path": "models/smollm2", "task": {"class": "tasks:Sums"}, "num_prompts_per_step": 8, "sampling": {"n": 4},
        "grader": {"weights": {"format": 0.5}}, "algorithm": {"loss": {"class": "losses:Clip"}, "kl": {"coef": 0.0}},
        "trainer": {"mixed_precision_param": "bfloat16", "optimizer": {"lr": 1e-5}},
    }  # fmt: skip
    expected = "smollm2 on Sums, 20 steps of 8 prompts × 4 completions, reward correct + 0.5 × format, loss Clip, "
    assert asked(run) == expected + "learning rate 1e-05, bfloat16"


def test_a_failed_run_says_where_and_with_which_error():
    end = {"outcome": "failed", "error": "KeyError: furlong", "message": "Traceback\nKeyError"}
    found = ending(run_of(end=end | {"rank": 1, "phase": "step 21: grade"}, num_steps=50))
    assert found["text"].startswith("Failed in step 21, grade (rank 1): 20 of 50 steps")
    assert (found["error"], found["details"], found["level"]) == ("KeyError: furlong", "Traceback\nKeyError", "bad")


def test_a_run_that_stopped_itself_is_bad_and_one_stopped_by_a_signal_is_a_warning():
    stopped = {"outcome": "stopped", "error": "the log-probs differ", "message": "stopped: the log-probs differ"}
    found = ending(run_of(end=stopped | {"code": 3}))
    assert (found["level"], found["error"], found["details"]) == ("bad", "the log-probs differ", "")
    assert found["failed"] is None
    assert ending(run_of(end=stopped | {"code": 130}))["level"] == "warn"
