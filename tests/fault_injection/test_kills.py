"""SIGKILL, as the out-of-memory killer sends it, to everything and to single processes, at any moment."""

import random
import signal
import time

import pytest

from tests.fault_injection.conftest import STEPS
from tests.fault_injection.harness import copy_until, metrics_of, start, steps_of, train, weights_of

KILLED = 128 + signal.SIGKILL
PHASES = [
    "build and shard the policy (qwen3 4x256)", "start the vLLM engine", "generate", "grade", "gather", "train", "sync",
    "checkpoint/save", "checkpoint/save", "checkpoint/save",
]  # fmt: skip
"""Where a run is hurt; writing a checkpoint, the most delicate, three times as often."""


def moments(seed, number):
    """(phase, seconds after it was entered) of `number` kills: every phase in turn, at random moments within it."""
    chance = random.Random(seed)
    return [(PHASES[i % len(PHASES)], chance.choice([0, 0.01, 0.03, 0.06, 0.1, 0.3])) for i in range(number)]


def test_everything_killed_at_20_random_moments_ends_with_the_same_bits(whole_run, tmp_path):
    killed = 0
    for number, (phase, seconds) in enumerate(moments(seed=7, number=20)):
        run = start(tmp_path, *STEPS, log=f"{number}.log")
        try:
            run.wait_in(phase)
        except AssertionError:
            assert run.end().code == 0, run.output  # nothing was left to be killed in
            break
        time.sleep(seconds)
        killed += run.kill_everything().code == KILLED
        for step in steps_of(tmp_path / "run"):
            assert (tmp_path / "run" / "checkpoint" / f"step-{step}" / "manifest.json").exists()
    assert train(tmp_path, *STEPS).code == 0
    assert killed >= 12
    assert weights_of(tmp_path / "run", 6) == weights_of(whole_run, 6)
    assert list(metrics_of(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("phase", ["generate", "grade", "checkpoint/save"])
def test_a_killed_rank_of_two_is_named_the_job_ends_and_goes_on_with_the_same_bits(whole_run_2, tmp_path, phase):
    copy_until(whole_run_2, 2, tmp_path)
    run = start(tmp_path, *STEPS, ranks=2, log="killed.log")
    run.wait_for("resuming after step 2")
    run.wait_in(phase, rank=1)
    run.signal(signal.SIGKILL, rank=1)
    ended = run.end(60)
    assert ended.code == KILLED
    assert ended.seconds < 40
    ended.says(
        r"rank 1 \(.*\) in step \d: .* was killed by signal 9 \(SIGKILL\)", "Its peak was", "--dump-folder .* goes on"
    )
    ended.never_says("Traceback")
    assert [c for c in run.everything().values() if "train" in c and "launch" not in c] == []
    assert train(tmp_path, *STEPS, ranks=2).code == 0
    assert weights_of(tmp_path / "run", 6) == weights_of(whole_run_2, 6)


def test_a_killed_rank_of_four_is_named(tmp_path):
    run = start(tmp_path, *STEPS, ranks=4)
    run.wait_in("train", rank=3)
    run.signal(signal.SIGKILL, rank=3)
    ended = run.end(90)
    assert ended.code == KILLED
    ended.says(r"rank 3 \(.*\) in step 1: .* was killed by signal 9")
    ended.never_says("Traceback")


@pytest.mark.parametrize("victim", ["torchtitan_rl.launch", "torchtitan_rl.run.agent"])
def test_nothing_outlives_the_launcher_or_the_agent(tmp_path, victim):
    run = start(tmp_path, "--num-steps", "500", ranks=2, log="orphans.log")
    run.wait_in("generate")
    if victim == "torchtitan_rl.launch":
        run.signal(signal.SIGKILL)
    else:
        import os

        agent = next(pid for pid, command in run.everything().items() if victim in command)
        os.kill(agent, signal.SIGKILL)
    assert run.end(30).code == KILLED
    deadline = time.monotonic() + 5
    while run.everything() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert run.everything() == {}
