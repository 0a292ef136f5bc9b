"""Ctrl-C, SIGTERM and a time limit's SIGUSR1: once saves and ends, twice ends at once."""

import signal
import time

import pytest

from tests.fault_injection.conftest import STEPS
from tests.fault_injection.harness import start, steps_of, train, weights_of

OWN = ["--generator.ranks", "1"]
"""Rank 1 only samples."""
LONG = ["--num-steps", "500", "--checkpoint.interval", "500"]


@pytest.mark.parametrize(
    ("number", "phase", "code"),
    [
        (signal.SIGINT, "generate", 130),
        (signal.SIGTERM, "train", 143),
        (signal.SIGINT, "checkpoint/save", 130),
        (signal.SIGUSR1, "grade", 75),
    ],
)
def test_first_stop_signal_saves_after_the_step_and_the_run_resumes_bitwise(whole_run, tmp_path, number, phase, code):
    run = start(tmp_path, *STEPS)
    run.wait_in(phase)
    run.signal(number)
    ended = run.end(60)
    assert ended.code == code
    ended.says(
        f"{number.name}: saving a checkpoint after this step; a second signal stops at once",
        r"stopped by SIG\w+ after step \d; the same command with --dump-folder .*run goes on",
    )
    ended.never_says("Traceback", "killed")
    assert steps_of(tmp_path / "run")
    assert train(tmp_path, *STEPS, log="again.log").code == 0
    assert weights_of(tmp_path / "run", 6) == weights_of(whole_run, 6)


@pytest.mark.parametrize(("more", "rank"), [([], None), (OWN, None), (OWN, 1)])
def test_all_ranks_stop_after_the_same_step(tmp_path, more, rank):
    run = start(tmp_path, *LONG, *more, ranks=2)
    run.wait_in("step 1: generate", rank=1)
    run.signal(signal.SIGTERM, rank)
    ended = run.end(60)
    assert ended.code == 143
    ended.says("stopped by SIGTERM after step 1; ")
    assert steps_of(tmp_path / "run") == [1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_stop_signal_before_the_first_step_ends_at_once_without_a_traceback(tmp_path, number):
    run = start(tmp_path, *LONG)
    run.wait_in("start the vLLM engine")
    run.signal(number)
    ended = run.end(20)
    assert ended.code == 128 + number
    ended.says(f"{number.name} before the first step: nothing new is saved")
    ended.never_says("Traceback")


@pytest.mark.quick
def test_ctrl_c_during_imports_ends_at_once_with_one_sentence(tmp_path):
    run = start(tmp_path, *LONG)
    run.wait_until(lambda: len(run.everything()) >= 2, "start the rank")
    time.sleep(0.5)  # into its imports
    run.signal(signal.SIGINT)
    ended = run.end(20)
    assert ended.code == 130
    assert ended.seconds < 5
    ended.says("SIGINT before the first step: nothing new is saved")
    ended.never_says("Traceback")
    assert run.left() == {}
