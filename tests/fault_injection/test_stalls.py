"""Ranks that are stopped or hang: who it is, where, said in time, and the job's end."""

import signal
import time

import pytest

from tests.fault_injection.harness import start

LIMITS = ["--watchdog.notice-seconds", "10", "--watchdog.limit-seconds", "30", "--num-steps", "500"]
OWN = ["--generator.ranks", "1"]
"""Rank 1 only samples."""
REWARD = ["--grader.rewards", "tests/fault_injection/rewards.py:hangs", "--grader.in-process", "hangs"]


@pytest.mark.parametrize(("more", "phase"), [([], "train"), (OWN, "step 1: generate"), (OWN, "step 1: idle_generator")])
def test_suspended_rank_is_named_with_a_remedy_and_the_job_ends_at_the_timeout(tmp_path, more, phase):
    run = start(tmp_path, *LIMITS, *more, ranks=2)
    run.wait_in(phase, rank=1)
    run.signal(signal.SIGSTOP, rank=1)
    said = run.wait_for(r"watchdog: rank 1 \(.*\) in step \d+: .* for \d+ s; rank 0 \(.*\) waits in")
    assert said < 30
    ended = run.end(60)
    assert ended.code == 1
    ended.says(
        r"rank 1 is stopped by a signal: kill -CONT \d+",
        r"longer than the limit \(30 s, in a step watchdog.limit_seconds\); the job is ended",
    )
    assert ended.seconds < 45
    ended.never_says("Traceback", "was killed by signal")


@pytest.mark.parametrize(
    ("ranks", "more", "waits"),
    [(1, [], ""), (2, [], "gathering all ranks' completions"), (2, OWN, "idle_trainer")],
)
def test_hanging_reward_is_shown_with_its_stack(tmp_path, ranks, more, waits):
    bad = str(ranks - 1)
    run = start(tmp_path, *LIMITS, *REWARD, *more, "--checkpoint.interval", "1", ranks=ranks, BAD_RANK=bad)
    run.wait_until(lambda: (tmp_path / "run" / "checkpoint" / "step-1").exists(), "save")
    began = time.monotonic()
    run.wait_for(rf"watchdog: rank {bad} \(.*\) in step 2: grade for")
    assert time.monotonic() - began < 30
    run.wait_for(r"rewards.py\", line \d+ in hangs")
    if ranks == 2:
        run.wait_for(rf"step 2: {waits} \.\.\. \d+ s \(rank 1 \(.*\) in step 2: grade for \d+ s; rank 0 .* waits in")
    ended = run.end(60)
    assert ended.code == 1
    ended.says("the job is ended")
    assert (tmp_path / "run" / "logs" / f"stacks_rank_{bad}.txt").stat().st_size > 100
    assert (tmp_path / "run" / "checkpoint" / "step-1" / "manifest.json").exists()
