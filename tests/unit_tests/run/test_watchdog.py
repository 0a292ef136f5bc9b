"""Which ranks are stragglers, when they are reported and when a job ends, given the ranks' statuses."""

import json
import os
import socket
import time
from dataclasses import asdict, replace

import pytest

from torchtitan_rl.run import job_processes
from torchtitan_rl.run.rank_status import (
    RankStatus,
    StatusFile,
    describe_stragglers,
    heartbeat_text,
    read_statuses,
    status_file_path,
    stragglers,
)
from torchtitan_rl.run.watchdog import SILENT_NODE_ENDS_S, Watchdog


def status(rank, phase="step 3: gather", since=100.0, changes=30_007, **more):
    return RankStatus(rank=rank, host="node0", pid=2**22 + rank, phase=phase, since=since, changes=changes, **more)


def write(folder, *ranks):
    for one in ranks:
        status_file_path(folder, one.rank).write_text(json.dumps(asdict(one)))


@pytest.fixture(autouse=True)
def alive(monkeypatch):
    """The ranks of these tests have no processes."""
    monkeypatch.setattr(job_processes, "state", lambda pid: "S")


@pytest.fixture
def watchdog(tmp_path):
    said = []
    watchdog = Watchdog(tmp_path, said.append)
    watchdog.said = said
    return watchdog


def test_the_rank_with_the_fewest_phase_changes_is_the_straggler():
    ranks = [status(0), status(1, "step 3: grade", 80.0, 30_005), status(2)]
    assert stragglers(ranks) == [ranks[1]]
    assert (
        describe_stragglers(ranks, 106.0)
        == "rank 1 (node0) in step 3: grade for 26 s; ranks 0, 2 wait in step 3: gather"
    )
    assert describe_stragglers([ranks[0], ranks[2]], 106.0) == "ranks 0, 2 in step 3: gather for 6 s"


def test_a_pause_of_the_whole_job_counts_for_no_rank(watchdog, tmp_path):
    write(tmp_path, status(0, limit_s=1_500.0), status(1, limit_s=1_500.0))
    assert watchdog.check(105) == ""
    watchdog.resume(9_000)
    assert watchdog.check(9_001) == ""
    assert watchdog.said == []
    assert "longer than watchdog.limit_seconds" in watchdog.check(9_000 + 1_501)  # one that hangs all the same


def test_a_stopped_rank_is_the_straggler_among_ranks_in_one_phase(monkeypatch):
    here = [replace(status(rank, "step 3: train"), host=socket.gethostname()) for rank in range(3)]
    monkeypatch.setattr(job_processes, "state", lambda pid: "T" if pid == here[1].pid else "S")
    assert stragglers(here) == [here[1]]
    assert describe_stragglers(here, 106.0).endswith("in step 3: train for 6 s; ranks 0, 2 wait in step 3: train")
    elsewhere = [replace(one, host="node7") for one in here]  # process ids of another node
    assert stragglers(elsewhere) == elsewhere


def test_a_late_rank_is_reported_again_after_twice_the_time(watchdog, tmp_path):
    write(tmp_path, status(0), status(1, "step 3: grade", 100.0, 30_005))
    for now in (120, 124):
        assert watchdog.check(now) == ""
    assert watchdog.said == []
    for now in (126, 130, 150):
        watchdog.check(now)
    assert [text.partition(";")[0] for text in watchdog.said if "watchdog" in text] == [
        "watchdog: rank 1 (node0) in step 3: grade for 26 s"
    ]
    watchdog.check(153)
    assert "for 53 s" in watchdog.said[-2]


def test_phase_is_late_after_three_times_its_longest_duration(watchdog, tmp_path):
    write(tmp_path, status(0, "step 1: generate", 100.0, 10_001))
    watchdog.check(101)
    write(tmp_path, status(0, "step 1: grade", 140.0, 10_003))
    watchdog.check(141)
    write(tmp_path, status(0, "step 2: generate", 150.0, 20_001))
    watchdog.check(260)
    assert watchdog.said == []
    watchdog.check(271)
    assert "in step 2: generate for 121 s" in watchdog.said[0]


def test_generation_that_decodes_is_not_late_and_one_that_hangs_is_named(watchdog, tmp_path):
    generating = status(0, "step 2: generate", 100.0, 20_001)
    for now in range(100, 3_000, 10):  # far above the notice, three times the longest, and the limit
        write(tmp_path, replace(generating, advanced=float(now)))
        assert watchdog.check(now + 1) == ""
    assert watchdog.said == []
    watchdog.check(2_990 + 31)
    assert "in step 2: generate for 2921 s, without progress for 31 s" in watchdog.said[0]
    assert watchdog.check(2_990 + 1_501).startswith("rank 0 (node0) in step 2: generate for 4391 s, without progress")


def test_a_stopped_rank_is_named_at_the_notice_however_slow_the_run(watchdog, tmp_path, monkeypatch):
    first = replace(status(0, "start the vLLM engine", 100.0, 1), host=socket.gethostname())
    write(tmp_path, first)
    watchdog.check(101)
    write(tmp_path, replace(first, phase="step 1: train", since=400.0, changes=10_001))
    watchdog.check(401)
    monkeypatch.setattr(job_processes, "state", lambda pid: "T")
    watchdog.check(426)
    assert "in step 1: train for 26 s" in watchdog.said[0]


def test_the_limit_ends_the_job_and_is_longer_before_the_first_step(watchdog, tmp_path):
    write(tmp_path, status(0, "start the vLLM engine", 100.0, 3, limit_s=200.0))
    assert (watchdog.check(200), watchdog.said) == ("", [])
    watchdog.check(7_299)
    assert watchdog.check(7_301).startswith(
        "rank 0 (node0) in start the vLLM engine for 7201 s: longer than the limit of this phase"
    )
    write(tmp_path, status(0, limit_s=200.0))
    assert watchdog.check(301).startswith(
        "rank 0 (node0) in step 3: gather for 201 s: longer than watchdog.limit_seconds (200 s)"
    )


def test_changing_the_system_clock_ends_no_job(watchdog, tmp_path, monkeypatch):
    status_file = StatusFile(0, str(tmp_path))
    status_file.moved("step 3: gather")
    monkeypatch.setattr(time, "time", lambda: 1e10)
    status_file.update(limit_s=100.0)
    assert (watchdog.check(time.monotonic()), watchdog.said, heartbeat_text()) == ("", [], "")


def test_node_without_heartbeats_ends_the_job(tmp_path, monkeypatch):
    now, said = time.monotonic(), [[], []]
    watchdogs = []
    for node in range(2):
        (tmp_path / f"watch{node}").mkdir()
        watchdogs.append(Watchdog(tmp_path / f"watch{node}", said[node].append))
        one = status(node, since=now - 40 * node, changes=7 - node, all_here=False, run_folder=str(tmp_path / "run"))
        write(
            tmp_path / f"watch{node}",
            replace(one, host=f"node{node}", phase=f"step 3: {'grade' if node else 'gather'}"),
        )
    monkeypatch.setattr(os, "getpid", lambda: 1)
    watchdogs[1].check(now + 1)
    assert watchdogs[0].check(now + 2) == ""
    assert said[0][0].startswith(
        "watchdog: rank 1 (node1) in step 3: grade for 41 s; rank 0 (node0) waits in step 3: gather"
    )
    watchdogs[0].check(now + 40)
    assert "watchdog: no news from rank 1 (node1) on node node1-1 for 38 s; the job is ended at 180 s" in said[0]
    watchdogs[0].check(now + 2 + SILENT_NODE_ENDS_S)
    assert watchdogs[0].check(now + 3 + SILENT_NODE_ENDS_S).startswith("no news from rank 1")


def test_a_status_is_written_in_microseconds(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    status_file = StatusFile(1, str(tmp_path))
    status_file.update(run_folder="/run")
    for phase in ("start the vLLM engine", "step 7: generate", "step 7: grade"):
        status_file.moved(phase)
    (found,) = read_statuses(tmp_path)
    assert (found.phase, found.changes, found.run_folder, found.all_here) == ("step 7: grade", 70_001, "/run", False)
    began = time.process_time()
    for _ in range(1000):
        status_file.moved("step 7: grade")
    assert time.process_time() - began < 0.5
    status_file_path(tmp_path, 1).write_text("{torn")
    assert read_statuses(tmp_path) == []
