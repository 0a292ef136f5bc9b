"""Whatever ends before training has ended is no success, and says why."""

import shutil

import pytest

from tests.fault_injection.harness import start, steps_of, train

SHORT = ["--num-steps", "4", "--checkpoint.interval", "1"]


def reward(name, *, in_process=False):
    named = ["--grader.rewards", f"tests/fault_injection/rewards.py:{name}"]
    return [*named, "--grader.in-process", name] if in_process else named


@pytest.mark.parametrize(
    ("name", "in_process", "code", "message"),
    [
        ("exits", False, 3, "stopped: .*exits.*SystemExit: 0"),
        ("vanishes", False, 3, "stopped: .*vanishes.*its process ended with exit code 0"),
        ("vanishes", True, 1, r"rank 0 \(.*\) in step 2: grade ended with code 0 before the end of training"),
    ],
)
def test_reward_that_calls_exit_stops_the_run_with_a_message_and_keeps_the_checkpoint(
    tmp_path, name, in_process, code, message
):
    ended = train(tmp_path, *SHORT, *reward(name, in_process=in_process))
    assert ended.code == code
    ended.says(message)
    assert steps_of(tmp_path / "run") == [1]


def test_job_exits_with_1_if_one_of_two_ranks_exits_early_with_0(tmp_path):
    ended = train(tmp_path, *SHORT, *reward("vanishes", in_process=True), ranks=2, BAD_RANK="1")
    assert ended.code == 1
    ended.says(r"rank 1 \(.*\) in step 2: grade ended with code 0 before the end of training")
    ended.never_says("Traceback")


def test_processes_started_by_rewards_end_with_the_run(tmp_path):
    run = start(tmp_path, *SHORT, *reward("leaves_a_child"))
    assert run.end().code == 0
    assert not [command for command in run.everything().values() if "sleep" in command]


def test_deleting_the_run_folder_stops_the_run_with_exit_code_3(tmp_path):
    run = start(tmp_path, "--num-steps", "500", "--checkpoint.interval", "500")
    run.wait_in("train")
    while (tmp_path / "run").exists():
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
    ended = run.end(60)
    assert ended.code == 3
    ended.says("stopped: the run folder .* has vanished")
    ended.never_says("Traceback")
