"""Who is behind, when it is said, and when a job ends, from the ranks' places alone."""

import json
import os
import socket
import time
from dataclasses import asdict, replace

import pytest

from torchtitan_rl.resilience import processes
from torchtitan_rl.resilience.board import WATCH, Board, Place, behind, describe, heartbeat_text, place_file, places
from torchtitan_rl.resilience.watchdog import SILENT_NODE_ENDS_S, Watchdog


def place(rank, phase="step 3: gather", since=100.0, changes=30_007, **more):
    return Place(rank=rank, host="node0", pid=2**22 + rank, phase=phase, since=since, changes=changes, **more)


def write(folder, *ranks):
    for one in ranks:
        place_file(folder, one.rank).write_text(json.dumps(asdict(one)))


@pytest.fixture(autouse=True)
def alive(monkeypatch):
    """These ranks are no processes of this machine."""
    monkeypatch.setattr(processes, "state", lambda pid: "S")


@pytest.fixture
def dog(tmp_path):
    said = []
    dog = Watchdog(tmp_path, said.append)
    dog.said = said
    return dog


def test_who_has_changed_phase_least_holds_up_the_others():
    ranks = [place(0), place(1, "step 3: grade", 80.0, 30_005), place(2)]
    assert behind(ranks) == [ranks[1]]
    assert describe(ranks, 106.0) == "rank 1 (node0) in step 3: grade for 26 s; ranks 0, 2 wait in step 3: gather"
    assert describe([ranks[0], ranks[2]], 106.0) == "ranks 0, 2 in step 3: gather for 6 s"


def test_of_ranks_in_one_phase_the_stopped_one_holds_up_the_others(monkeypatch):
    here = [replace(place(rank, "step 3: train"), host=socket.gethostname()) for rank in range(3)]
    monkeypatch.setattr(processes, "state", lambda pid: "T" if pid == here[1].pid else "S")
    assert behind(here) == [here[1]]
    assert describe(here, 106.0).endswith("in step 3: train for 6 s; ranks 0, 2 wait in step 3: train")
    elsewhere = [replace(one, host="node7") for one in here]  # whose process ids are others' here
    assert behind(elsewhere) == elsewhere


def test_a_late_rank_is_said_once_until_it_has_waited_twice_as_long(dog, tmp_path):
    write(tmp_path, place(0), place(1, "step 3: grade", 100.0, 30_005))
    for now in (120, 124):
        assert dog.look(now) == ""
    assert dog.said == []
    for now in (126, 130, 150):
        dog.look(now)
    assert [text.partition(";")[0] for text in dog.said if "watchdog" in text] == [
        "watchdog: rank 1 (node0) in step 3: grade for 26 s"
    ]
    dog.look(153)
    assert "for 53 s" in dog.said[-2]


def test_a_phase_that_took_long_before_is_late_at_three_times_that(dog, tmp_path):
    write(tmp_path, place(0, "step 1: generate", 100.0, 10_001))
    dog.look(101)
    write(tmp_path, place(0, "step 1: grade", 140.0, 10_003))
    dog.look(141)
    write(tmp_path, place(0, "step 2: generate", 150.0, 20_001))
    dog.look(260)
    assert dog.said == []
    dog.look(271)
    assert "in step 2: generate for 121 s" in dog.said[0]


def test_a_start_has_time_and_the_limit_ends_the_job(dog, tmp_path):
    write(tmp_path, place(0, "start the vLLM engine", 100.0, 3, limit_s=200.0))
    assert (dog.look(200), dog.said) == ("", [])
    dog.look(7_299)
    assert dog.look(7_301).startswith("rank 0 (node0) in start the vLLM engine for 7201 s: longer than watchdog.limit")
    write(tmp_path, place(0, limit_s=200.0))
    assert dog.look(301).startswith(
        "rank 0 (node0) in step 3: gather for 201 s: longer than watchdog.limit_seconds (200 s)"
    )
    write(tmp_path, replace(place(0), outcome="done"))
    assert dog.look(10_000) == ""


def test_a_clock_that_is_set_ends_no_job_and_makes_nobody_late(dog, tmp_path, monkeypatch):
    board = Board(0, str(tmp_path))
    board.moved("step 3: gather")
    monkeypatch.setattr(time, "time", lambda: 1e10)
    board.update(limit_s=100.0)
    assert (dog.look(time.monotonic()), dog.said, heartbeat_text()) == ("", [], "")


def test_what_an_earlier_job_left_of_a_node_is_not_heard(tmp_path):
    left, said = tmp_path / "run" / "logs" / "nodes" / "node1-7.json", []
    left.parent.mkdir(parents=True)
    (tmp_path / "watch").mkdir()
    late = asdict(place(1, changes=1, since=0.0))
    dog = Watchdog(tmp_path / "watch", said.append)
    write(tmp_path / "watch", place(0, since=100.0, all_here=False, run_folder=str(tmp_path / "run")))
    left.write_text(json.dumps({"at": 0.0, "sent": 100.0, "places": [late], "ended": "it was killed"}))
    assert [dog.look(101.0 + second) for second in range(3)] == [""] * 3
    left.write_text(json.dumps({"at": 1.0, "sent": 104.0, "places": [late], "ended": "it was killed"}))
    assert dog.look(104.0) == "node node1-7 has ended: it was killed"


def test_nodes_tell_each_other_and_a_silent_one_ends_the_job(tmp_path, monkeypatch):
    now, said = time.monotonic(), [[], []]
    dogs = []
    for node in range(2):
        (tmp_path / f"watch{node}").mkdir()
        dogs.append(Watchdog(tmp_path / f"watch{node}", said[node].append))
        one = place(node, since=now - 40 * node, changes=7 - node, all_here=False, run_folder=str(tmp_path / "run"))
        write(
            tmp_path / f"watch{node}",
            replace(one, host=f"node{node}", phase=f"step 3: {'grade' if node else 'gather'}"),
        )
    monkeypatch.setattr(os, "getpid", lambda: 1)
    dogs[1].look(now + 1)
    assert dogs[0].look(now + 2) == ""
    assert said[0][0].startswith(
        "watchdog: rank 1 (node1) in step 3: grade for 41 s; rank 0 (node0) waits in step 3: gather"
    )
    dogs[0].look(now + 40)
    assert "watchdog: nothing is heard of rank 1 (node1) on node node1-1 for 38 s; the job is ended at 180 s" in said[0]
    dogs[0].look(now + 2 + SILENT_NODE_ENDS_S)
    assert dogs[0].look(now + 3 + SILENT_NODE_ENDS_S).startswith("nothing is heard of rank 1")


def test_a_board_writes_where_a_rank_is_in_microseconds(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    board = Board(1, str(tmp_path))
    board.update(run_folder="/run")
    for phase in ("start the vLLM engine", "step 7: generate", "step 7: grade"):
        board.moved(phase)
    (found,) = places(tmp_path)
    assert (found.phase, found.changes, found.run_folder, found.all_here) == ("step 7: grade", 70_001, "/run", False)
    began = time.process_time()
    for _ in range(1000):
        board.moved("step 7: grade")
    assert time.process_time() - began < 0.5
    place_file(tmp_path, 1).write_text("{torn")
    assert places(tmp_path) == []


def test_the_heartbeat_names_who_is_behind_and_nobody_otherwise(tmp_path, monkeypatch):
    assert heartbeat_text() == ""
    monkeypatch.setenv(WATCH, str(tmp_path))
    write(tmp_path, place(0), place(1))
    assert heartbeat_text() == ""
    write(tmp_path, place(1, "step 3: grade", changes=30_002))
    assert "rank 1 (node0) in step 3: grade for" in heartbeat_text()
