"""SIGKILL, as the out-of-memory killer sends it, to everything and to single processes, at any moment."""

import random
import signal
import time

import pytest

from tests.fault_injection.conftest import STEPS
from tests.fault_injection.harness import copy_until, metrics_of, start, steps_of, train, weights_of

KILLED = 128 + signal.SIGKILL
MANY = ["--num-steps", "60", "--checkpoint.interval", "1"]
DEMONSTRATIONS = [
    "--config", "debug_sft", "--sampling.n", "1", "--evaluation.sampling.n", "0", "--evaluation.every", "4", "--evaluation.num-prompts", "32",
    "--num-prompts-per-step", "8", "--num-steps", "12", "--checkpoint.interval", "1",
]  # fmt: skip
REWARD = ["--grader.rewards", "tests/fault_injection/rewards.py:leaves_a_child"]
LORA = ["--trainer.lora.rank", "4"]


def wait_for_a_moment(run, folder, kind, chance):
    """Let the run come to a random moment: of its start, of its steps, or of the writing of a checkpoint."""
    if kind == "start":
        run.wait_in(chance.choice(["build the policy (2.4 million parameters)", "start the vLLM engine"]))
        time.sleep(chance.uniform(0, 3))
        return
    run.wait_until(lambda: any(p.phase.startswith("step ") for p in run.statuses().values()), "begin a step")
    saved, more = max(steps_of(folder), default=0), chance.randint(0, 3)  # else a slow machine never comes past step 1
    run.wait_until(lambda: max(steps_of(folder), default=0) >= saved + more, f"save {more} steps more")
    time.sleep(chance.uniform(0, 0.3))
    if kind == "write":
        run.wait_until(lambda: any(folder.glob("checkpoint/.writing-*")), "write a checkpoint")
        time.sleep(chance.uniform(0, 0.05))


def half_written(folder):
    """What kills have left of checkpoints, as numbers that the file system gives."""
    return {path.stat().st_ino for path in folder.glob("checkpoint/.writing-*")}


def test_kill_at_20_random_moments_resumes_bitwise(tmp_path, tmp_path_factory):
    whole = tmp_path_factory.mktemp("whole60")
    assert train(whole, *MANY).code == 0
    chance, torn = random.Random(7), 0
    for number in range(20):
        before = half_written(tmp_path / "run")
        run = start(tmp_path, *MANY, log=f"{number}.log")
        wait_for_a_moment(run, tmp_path / "run", ["write", "step", "start", "step", "write"][number % 5], chance)
        assert run.kill_everything().code == KILLED
        torn += bool(half_written(tmp_path / "run") - before)
        for step in steps_of(tmp_path / "run"):
            assert (tmp_path / "run" / "checkpoint" / f"step-{step}" / "manifest.json").exists()
    assert torn, "no kill came in the middle of a checkpoint's writing"
    assert train(tmp_path, *MANY).code == 0
    print(f"20 kills, {torn} of them while a checkpoint was written")
    assert weights_of(tmp_path / "run", 60) == weights_of(whole / "run", 60)
    assert list(metrics_of(tmp_path / "run")) == list(range(1, 61))


@pytest.mark.parametrize("phase", ["generate", "grade", "checkpoint/save"])
def test_killed_rank_of_two_is_named_and_the_job_resumes_bitwise(whole_run_2, tmp_path, phase):
    copy_until(whole_run_2, 2, tmp_path)
    run = start(tmp_path, *STEPS, ranks=2, log="killed.log")
    run.wait_for("resuming after step 2")
    run.wait_in(phase, rank=1)
    run.signal(signal.SIGKILL, rank=1)
    ended = run.end(60)
    assert ended.code == KILLED
    assert ended.seconds < 40
    ended.says(
        r"rank 1 \(.*\) in step \d: .* was killed by signal 9 \(SIGKILL\), mostly because memory ran out\. Lower trainer",
        r"The same command with --dump-folder .* goes on after step-\d\.",
    )
    ended.never_says("Traceback")
    assert run.left() == {}
    assert train(tmp_path, *STEPS, ranks=2).code == 0
    assert weights_of(tmp_path / "run", 6) == weights_of(whole_run_2, 6)


@pytest.mark.parametrize(("ranks", "more"), [(1, []), (2, ["--trainer.parallelism.expert-parallel-degree", "2"])])
def test_killed_mixture_of_experts_resumes_bitwise(tmp_path, tmp_path_factory, ranks, more):
    whole, args = tmp_path_factory.mktemp("whole"), ["--config", "debug_moe", *STEPS, *more]
    assert train(whole, *args, ranks=ranks).code == 0
    run = start(tmp_path, *args, ranks=ranks, log="killed.log")
    run.wait_until(lambda: 2 in steps_of(tmp_path / "run"), "save step 2")
    assert run.kill_everything().code == KILLED
    saved = max(steps_of(tmp_path / "run"))
    assert saved < 6
    train(tmp_path, *args, ranks=ranks).says(f"resuming after step {saved}")
    assert weights_of(tmp_path / "run", 6) == weights_of(whole / "run", 6)
    assert list(metrics_of(tmp_path / "run")) == list(range(1, 7))


@pytest.mark.parametrize(("ranks", "more"), [(1, []), (2, []), (2, LORA)])
def test_killed_demonstrations_resume_bitwise(tmp_path, tmp_path_factory, ranks, more):
    whole, args = tmp_path_factory.mktemp("whole"), [*DEMONSTRATIONS, *more]
    assert train(whole, *args, ranks=ranks).code == 0
    run = start(tmp_path, *args, ranks=ranks, log="killed.log")
    run.wait_until(lambda: max(steps_of(tmp_path / "run"), default=0) >= 2, "save step 2")
    assert run.kill_everything().code == KILLED
    assert max(steps_of(tmp_path / "run")) < 12
    resumed = train(tmp_path, *args, ranks=ranks)
    assert resumed.code == 0
    resumed.says(r"resuming after step \d")
    assert weights_of(tmp_path / "run", 12) == weights_of(whole / "run", 12)
    found = metrics_of(tmp_path / "run")
    assert list(found) == list(range(13))
    assert found[12]["evaluation/loss"] == metrics_of(whole / "run")[12]["evaluation/loss"]


def test_no_process_outlives_a_killed_launcher(tmp_path):
    run = start(tmp_path, "--num-steps", "500", *REWARD, ranks=2, log="orphans.log")
    run.wait_until(lambda: "sleep 1000 " in run.everything().values(), "start a process in a reward")
    run.signal(signal.SIGKILL)
    assert run.end(30).code == KILLED
    assert run.left() == {}


TALK = "tests/parts/talk.py"
TRACES = {
    "compacted in process, 2 ranks": (2, ["--config", f"{TALK}:talk_traces"]),
    "compacted in process, LoRA": (1, ["--config", f"{TALK}:talk_traces", "--trainer.lora.rank", "4"]),
    "compacted by an agent, 2 ranks": (2, ["--config", f"{TALK}:talk_agent_traces"]),
    "compacted by an agent, LoRA": (1, ["--config", f"{TALK}:talk_agent_traces", "--trainer.lora.rank", "4"]),
}
"""Runs whose rollouts have several traces: ranks and arguments."""


@pytest.mark.parametrize("kind", TRACES)
def test_killed_rollouts_of_several_traces_resume_bitwise(tmp_path, kind):
    ranks, args = TRACES[kind]
    whole = tmp_path / "whole"
    whole.mkdir()
    assert train(whole, *args, *STEPS, ranks=ranks).code == 0
    assert metrics_of(whole / "run")[6]["conversations/traces/mean"] > 1
    run = start(tmp_path, *args, *STEPS, ranks=ranks, log="killed.log")
    run.wait_until(lambda: 2 in steps_of(tmp_path / "run"), "save step 2")
    run.wait_in("generate")
    assert run.kill_everything().code == KILLED
    saved = max(steps_of(tmp_path / "run"))
    assert saved < 6
    train(tmp_path, *args, *STEPS, ranks=ranks).says(f"resuming after step {saved}")
    assert weights_of(tmp_path / "run", 6) == weights_of(whole / "run", 6)
    assert list(metrics_of(tmp_path / "run")) == list(range(1, 7))
