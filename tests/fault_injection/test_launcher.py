"""The launcher over real torchrun and real processes: what it says, its exit code, and that nothing is left."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchtitan_rl.left_processes import find_marked

ROOT = Path(__file__).resolve().parents[2]


class Job:
    """A launched job of stub ranks."""

    def __init__(self, folder, act, *launcher, ranks=2, log="log"):
        self.folder, self.log = folder / "run", folder / log
        self.mark = f"STUB_JOB={folder}{log}"
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "STUB_JOB": f"{folder}{log}",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        command = [
            sys.executable,
            "-m",
            "torchtitan_rl.run.launch",
            *(launcher or ["--standalone"]),
            f"--nproc_per_node={ranks}",
        ]
        command += ["-m", "tests.fault_injection.stub_rank", act, str(self.folder)]
        with self.log.open("w") as stream:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=stream, stderr=stream, start_new_session=True
            )

    def wait_for_step_3(self, timeout_s=60):
        """Until both ranks have begun step 3."""
        deadline = time.monotonic() + timeout_s
        while not all((self.folder / f"rank_{rank}_at_3").exists() for rank in (0, 1)):
            assert time.monotonic() < deadline, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)

    def end(self, timeout_s=60):
        code = self.process.wait(timeout_s)
        return (code if code >= 0 else 128 - code), self.log.read_text()

    def how_it_ended(self):
        """The run's end.json."""
        return json.loads((self.folder / "end.json").read_text())

    def left(self, patience_s=3):
        deadline = time.monotonic() + patience_s
        while (left := find_marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


@pytest.mark.quick
def test_killed_rank_is_reported_with_phase_memory_and_resume_command(tmp_path):
    job = Job(tmp_path, "killed")
    code, said = job.end()
    assert code == 137
    end = job.how_it_ended()
    assert (end["outcome"], end["code"], end["rank"], end["phase"]) == ("killed", 137, 1, "step 3: grade")
    assert "in step 3: grade was killed by signal 9 (SIGKILL)" in end["message"]
    assert re.search(
        r"^rank 1 \(.*\) in step 3: grade was killed by signal 9 \(SIGKILL\)\. There is no sign of an out-of-memory kill",
        said,
        re.M,
    )
    assert re.search(
        r"Its peak was 0\.\d of (the .* its processes, and )?the node's \d+\.\d GiB of memory\. The same command with --dump-folder .*run "
        r"starts a new run, as no",
        said,
    )


def test_ranks_that_hang_after_training_are_killed_and_the_run_succeeds(tmp_path):
    job = Job(tmp_path, "lingers")
    code, said = job.end()
    assert code == 0, said
    assert re.search(
        r"^watchdog: ranks? .* in .* for 60\d s: longer than the limit of this phase \(600 s\); the job is ended$",
        said,
        re.M,
    )
    assert job.left() == []


@pytest.mark.quick
def test_second_stop_signal_kills_unresponsive_ranks(tmp_path):
    job = Job(tmp_path, "late")
    job.wait_for_step_3()
    time.sleep(0.3)
    job.process.send_signal(signal.SIGINT)
    job.process.send_signal(signal.SIGINT)  # the same request, as from a batch system that signals every process
    time.sleep(1.5)
    assert job.process.poll() is None
    began = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    code, said = job.end(10)
    assert (code, time.monotonic() - began < 3) == (130, True)
    assert "stopped at once" in said
    assert job.how_it_ended()["message"] == "SIGINT twice: stopped at once"
    assert job.how_it_ended()["outcome"] == "stopped"
    assert job.left() == []


def pause(job, seconds):
    """Stop all processes of a job, and let them go on, as `scontrol suspend` and `docker pause` do."""
    processes = find_marked(job.mark)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in processes:
            os.kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(seconds)


def test_pause_longer_than_the_limit_ends_no_job_and_a_rank_that_hangs_after_it_is_named(tmp_path):
    job = Job(tmp_path, "pause")
    job.wait_for_step_3()
    time.sleep(1.5)
    pause(job, 12)  # twice the limit
    code, said = job.end()
    assert code == 1
    assert "step 3" not in re.sub(
        r"(?m)^watchdog: .* the job is ended at 6 s$", "", said
    )  # reported at its notice, 1 s
    assert re.search(
        r"^watchdog: rank 1 \(.*\) in step 5: grade for [67] s; rank 0 \(.*\) waits? in .*"
        r": longer than watchdog\.limit_seconds \(6 s\); the job is ended$",
        said,
        re.M,
    )
    assert job.how_it_ended()["phase"] == "step 5: grade"


def open_rank(job, rank):
    """The process ids of a rank of the job."""
    entries = ((p, Path(f"/proc/{p}/environ").read_bytes().split(b"\0")) for p in find_marked(job.mark))
    return [str(p) for p, environment in entries if f"RANK={rank}".encode() in environment]


@pytest.mark.quick
def test_killed_launcher_leaves_no_process_even_in_another_session(tmp_path):
    job = Job(tmp_path, "child")
    job.wait_for_step_3()
    assert len(find_marked(job.mark)) >= 6
    job.process.kill()
    job.process.wait()
    assert job.left() == []


def two_nodes(tmp_path, act, *more):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = ["--nnodes=2", "--master_addr=127.0.0.1", f"--master_port={port}", *more]
    return [Job(tmp_path, act, f"--node_rank={n}", *common, ranks=1, log=f"node{n}") for n in range(2)]


def test_port_in_use_and_waiting_for_other_nodes_are_reported(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        common = ["--nnodes=2", "--master_addr=127.0.0.1", f"--master_port={port}"]
        code, said = Job(tmp_path, "run", "--node_rank=0", *common, ranks=1).end()
    assert code == 2
    assert (
        "error: another program, perhaps an older run, uses the port. Pass another MASTER_PORT, on every node" in said
    )
    assert "Traceback" not in said
    alone = Job(tmp_path, "run", "--node_rank=0", *common, ranks=1, log="alone")
    deadline = time.monotonic() + 30
    while "torchrun waits for the same command on the other nodes" not in alone.log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    alone.process.send_signal(signal.SIGINT)
    assert alone.end()[0] == 130


def test_node_whose_ranks_are_done_does_not_say_that_none_is_started(tmp_path):
    jobs = two_nodes(tmp_path, "early")
    for code, said in [job.end() for job in jobs]:
        assert code == 0, said
        assert "no rank is started yet" not in said


def test_stop_signal_on_one_node_gives_both_nodes_the_same_exit_code(tmp_path):
    first, second = two_nodes(tmp_path, "run")
    first.wait_for_step_3()
    for job in (first, second):
        job.process.send_signal(signal.SIGUSR2)
    assert (first.end()[0], second.end()[0]) == (75, 75)


def test_killed_rank_ends_both_nodes_with_the_reason(tmp_path):
    first, second = two_nodes(tmp_path, "late")
    first.wait_for_step_3()
    while len(list((first.folder / "logs" / "nodes").glob("*.json"))) < 2:
        time.sleep(0.1)
    os.kill(int(open_rank(second, 1)[0]), signal.SIGKILL)
    assert second.end()[0] == 137
    code, said = first.end(30)
    assert code == 1
    assert re.search(r"watchdog: node .* has ended: rank 1 \(.*\) in step 3: grade was killed by signal 9", said)


def test_lost_node_ends_the_other_node_with_a_reason(tmp_path):
    first, second = two_nodes(tmp_path, "late")
    first.wait_for_step_3()
    while len(list((first.folder / "logs" / "nodes").glob("*.json"))) < 2:
        time.sleep(0.1)
    for pid in find_marked(second.mark):
        os.kill(pid, signal.SIGKILL)
    second.process.wait()
    deadline = time.monotonic() + 50
    while "no news from rank 1" not in first.log.read_text() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert re.search(
        r"watchdog: no news from rank 1 \(.*\) on node .* for 3\d s; the job is ended at 180 s",
        first.log.read_text(),
    )
    first.process.send_signal(signal.SIGTERM)
    time.sleep(1.2)
    first.process.send_signal(signal.SIGTERM)
    assert first.end()[0] == 143
