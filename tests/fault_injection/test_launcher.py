"""The launcher over real torchrun and real processes: what it says, its exit code, and that nothing is left."""

import json
import signal
import socket
import sys
import time

import pytest

from tests.fault_injection.harness import spawn, two_nodes


def start(folder, act, *launcher, ranks=2, log="log"):
    """A job of stub ranks."""
    command = [sys.executable, "-m", "torchtitan_rl.run.launch", *(launcher or ["--standalone"])]
    command += [f"--nproc_per_node={ranks}", "-m", "tests.fault_injection.stub_rank", act, str(folder / "run")]
    return spawn(command, folder / log)


def wait_for_step_3(run, folder):
    """Until both ranks have begun step 3."""
    run.wait_until(lambda: len(list(folder.glob("run/rank_[01]_at_3"))) == 2, "begin step 3", 60)


def how_it_ended(folder):
    """The run's end.json."""
    return json.loads((folder / "run" / "end.json").read_text())


@pytest.mark.quick
def test_killed_rank_is_reported_with_phase_remedy_and_resume_command(tmp_path):
    ended = start(tmp_path, "killed").end(60)
    assert ended.code == 137
    end = how_it_ended(tmp_path)
    assert (end["outcome"], end["code"], end["rank"], end["phase"]) == ("killed", 137, 1, "step 3: grade")
    assert end["message"] in ended.output
    ended.says(
        r"(?m)^rank 1 \(.*\) in step 3: grade was killed by signal 9 \(SIGKILL\), mostly because memory ran out\. "
        r"Lower trainer.max_tokens_per_microbatch, .*node\. The same command with --dump-folder .*run starts a new run"
    )


def test_killed_evaluation_leaves_what_the_run_says_of_its_end(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "end.json").write_text('{"outcome": "done", "start": "run"}')
    (tmp_path / "run" / "run.lock").write_text("evaluation")
    assert start(tmp_path, "evaluates").end(60).code == 137
    assert how_it_ended(tmp_path)["outcome"] == "done"
    assert not (tmp_path / "run" / "report.html").exists()


def test_rank_that_ends_without_a_word_is_named_and_is_no_stop_of_training(tmp_path):
    ended = start(tmp_path, "exits").end(60)
    assert ended.code == 1
    message = "in step 3: grade ended with code 3 before the end of training"
    ended.says(rf"(?m)^rank 1 \(.*\) {message}\.$")
    end = how_it_ended(tmp_path)
    assert (end["outcome"], end["code"], end["rank"]) == ("failed", 1, 1)
    assert message in end["message"]


def test_ranks_that_hang_after_training_are_killed_and_the_run_succeeds(tmp_path):
    run = start(tmp_path, "lingers")
    ended = run.end(60)
    assert ended.code == 0
    ended.says(r"(?m)^watchdog: ranks? .* in end for [234] s: longer than the limit \(2 s, .*; the job is ended$")
    assert run.left() == {}


@pytest.mark.quick
def test_second_stop_signal_kills_unresponsive_ranks_and_what_they_have_started(tmp_path):
    run = start(tmp_path, "hangs")
    wait_for_step_3(run, tmp_path)
    time.sleep(0.3)
    assert any("sleep" in command for command in run.everything().values())
    run.signal(signal.SIGINT)
    run.signal(signal.SIGINT)  # the same request, as from a batch system that signals every process
    time.sleep(1.5)
    assert run.process.poll() is None
    run.signal(signal.SIGINT)
    ended = run.end(10)
    assert (ended.code, ended.seconds < 3) == (130, True)
    ended.says("SIGINT twice: stopped at once; earlier checkpoints are whole")
    assert how_it_ended(tmp_path)["outcome"] == "stopped"
    assert run.left() == {}


def test_rank_that_stands_still_is_named_and_ends_the_job(tmp_path):
    ended = start(tmp_path, "hangs").end(60)
    assert ended.code == 1
    ended.says(
        r"(?m)^watchdog: rank 1 \(.*\) in step 3: grade for [678] s; rank 0 \(.*\) waits? in .*"
        r": longer than the limit \(6 s, in a step watchdog\.limit_seconds\); the job is ended$"
    )
    end = how_it_ended(tmp_path)
    assert (end["outcome"], end["rank"], end["phase"]) == ("hung", 1, "step 3: grade")
    assert "in hang_here" in end["message"]


def test_unknown_option_of_torchrun_is_wrong_input(tmp_path):
    ended = start(tmp_path, "run", "--bogus").end(60)
    assert ended.code == 2
    ended.says("--bogus")


def test_port_in_use_and_waiting_for_other_nodes_are_reported(tmp_path):
    (first, _), port = two_nodes()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        ended = start(tmp_path, "run", *first, ranks=1).end(60)
    assert ended.code == 2
    ended.says(r"error: the nodes did not meet \(.*EADDRINUSE.*MASTER_PORT \(another one if a program uses it\)")
    ended.never_says("Traceback")
    alone = start(tmp_path, "run", *first, ranks=1, log="alone")
    alone.wait_for("torchrun waits for the same command on the other nodes", 60)
    alone.signal(signal.SIGINT)
    assert alone.end(10).code == 130


def test_stop_signal_on_one_node_gives_both_nodes_the_same_exit_code(tmp_path):
    nodes, _ = two_nodes()
    runs = [start(tmp_path, "run", *node, ranks=1, log=f"node{i}") for i, node in enumerate(nodes)]
    wait_for_step_3(runs[0], tmp_path)
    for run in runs:
        run.signal(signal.SIGUSR2)
    assert [run.end(60).code for run in runs] == [75, 75]
