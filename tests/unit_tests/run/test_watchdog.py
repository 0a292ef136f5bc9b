"""Which ranks are named as late, and when a job ends, given the ranks' statuses."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest

from torchtitan_rl.run import job_processes, rank_status
from torchtitan_rl.run.rank_status import (
    RankStatus,
    StatusFile,
    WatchdogLimits,
    describe,
    rank_failed,
    read_statuses,
    stragglers,
)
from torchtitan_rl.run.watchdog import Watchdog


def status(rank, phase="step 3: gather", at=100.0, changes=30_007, **more):
    more = {"notice_s": 25.0, "limit_s": 1_500.0, **more}
    return RankStatus(
        rank, host="node0", pid=2**22 + rank, phase=phase, began=at, progressed=at, changes=changes, **more
    )


@pytest.fixture
def said(tmp_path):
    return []


@pytest.fixture
def look(tmp_path, monkeypatch, said):
    """look(now, *statuses): the watchdog looks each second up to `now`, while the ranks have these statuses. Returns it."""
    monkeypatch.setattr(job_processes, "state", lambda pid: "S")
    monkeypatch.setattr(rank_status, "is_alive", lambda pid: True)
    monkeypatch.setattr(job_processes, "send_signal", lambda *_: None)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    watchdog = Watchdog(tmp_path, said.append)

    def look(now, *statuses):
        for each in statuses:
            (tmp_path / f"rank_{each.rank}.json").write_text(json.dumps(asdict(each)))
            (tmp_path / f"stacks_rank_{each.rank}.txt").touch()
        for second in range(int(watchdog._looked) + 1, now + 1):
            watchdog.look(float(second))
        return watchdog

    return look


def test_the_rank_with_the_fewest_phase_changes_is_the_straggler(monkeypatch):
    ranks = [status(0), status(1, "step 3: grade", 80.0, 30_005), status(2)]
    assert stragglers(ranks) == [ranks[1]]
    waiting = "rank 1 (node0) in step 3: grade for 26 s; ranks 0, 2 wait in step 3: gather"
    assert describe(ranks, 106.0) == waiting
    assert describe([ranks[0], ranks[2]], 106.0) == "ranks 0, 2 in step 3: gather for 6 s"
    monkeypatch.setattr(rank_status, "state", lambda pid: "T" if pid == ranks[2].pid else "S")
    assert stragglers([ranks[0], ranks[2]]) == [ranks[2]]  # stopped by a signal


def test_a_rank_that_waits_for_others_work_holds_up_nobody_unless_it_is_stopped(look, said, monkeypatch):
    trainer, generator = status(0, "step 3: train"), status(1, "step 3: idle_generator", changes=30_009, waits=True)
    assert stragglers([trainer, generator]) == [trainer]
    assert describe([trainer, generator], 106.0).endswith("; rank 1 (node0) waits in step 3: idle_generator")
    samples = replace(generator, phase="step 4: generate", waits=False, side="idle_generator")
    assert describe([trainer, samples], 106.0) == "rank 0 (node0) in step 3: train for 6 s"
    assert look(9_000, generator, replace(generator, rank=2)).hung is None  # the trainers are on another node
    assert said == []
    monkeypatch.setattr(rank_status, "state", lambda pid: "T" if pid == generator.pid else "S")
    assert stragglers([trainer, generator]) == [generator]


def test_a_late_rank_is_reported_again_after_twice_the_time(look, said):
    ranks = [status(0), status(1, "step 3: grade", 100.0, 30_005)]
    look(125, *ranks)
    assert said == []
    look(151)
    assert said[0].startswith("watchdog: rank 1 (node0) in step 3: grade for 26 s; rank 0 (node0) waits")
    assert len(said) == 2  # the second is where it stands
    look(153)
    assert "for 53 s" in said[2]


def test_a_late_rank_is_reported_though_the_file_for_its_stack_has_been_removed(look, said, tmp_path):
    watchdog = look(125, status(0), status(1, "step 3: grade", 100.0, 30_005))
    (tmp_path / "stacks_rank_1.txt").unlink()  # as systemd does with files in /tmp that are ten days old
    watchdog.look(126.0)
    assert said[0].startswith("watchdog: rank 1 (node0) in step 3: grade for 26 s")
    assert "it does not show its stack" in said[1]


def test_the_limit_ends_the_job_unless_the_job_was_paused(look, said):
    ranks = [status(0, limit_s=200.0), status(1, limit_s=200.0)]
    watchdog = look(290, *ranks)
    watchdog.look(9_000.0)
    look(9_200)
    assert watchdog.hung is None
    look(9_201)
    assert watchdog.hung == ranks[0]
    assert "longer than the limit (200 s, in a step watchdog.limit_seconds)" in watchdog.reason


def test_the_deadlines_of_a_phase_follow_the_longest_wait_so_far(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    file = StatusFile(0)
    file.limits = WatchdogLimits(notice_seconds=10.0, limit_seconds=100.0)

    def deadlines(phase, seconds):
        nonlocal now
        file.moved(phase)
        now += seconds
        return file.status.notice_s, file.status.limit_s

    assert deadlines("start the vLLM engine", 50.0) == (600.0, 7_200.0)
    assert deadlines("step 1: generate", 3.0) == (10.0, 100.0)
    file.advanced()
    assert file.status.progressed == 153.0
    now += 5.0
    assert deadlines("step 1: grade", 40.0) == (15.0, 100.0)
    assert deadlines("step 2: generate", 1.0) == (50.0, 100.0)  # at most half of the limit


def test_a_wait_for_others_work_is_not_the_ranks_own_time(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    file = StatusFile(0)
    file.moved("step 1: idle_trainer")
    with file.during("waiting", "idle_trainer"):
        assert (file.status.waits, file.status.side) == (True, "idle_trainer")
        now += 300.0
    file.moved("step 1: train")
    assert file.status.notice_s == WatchdogLimits().notice_seconds


def test_a_status_is_written_in_microseconds_and_a_vanished_rank_has_failed(tmp_path, monkeypatch):
    monkeypatch.setenv(rank_status.WATCH_VARIABLE, str(tmp_path))
    file = StatusFile(1)
    file.update(run_folder=str(tmp_path))
    file.moved("step 7: generate")
    file.moved("step 7: grade")
    (written,) = read_statuses(tmp_path)
    assert (written.phase, written.changes, written.run_folder) == ("step 7: grade", 70_001, str(tmp_path))
    began = time.process_time()
    for _ in range(1000):
        file.moved("step 7: grade")
    assert time.process_time() - began < 0.5
    assert not rank_failed()
    (tmp_path / "rank_0.json").write_text("{torn")
    assert len(read_statuses(tmp_path)) == 1
    (tmp_path / "rank_0.json").write_text(json.dumps(asdict(replace(file.status, pid=2**22))))
    assert rank_failed()
    assert os.getpid() == file.status.pid


HOLDS_THE_LOCK = """
import re
from concurrent.futures import Future
from torchtitan_rl.environments.threads import Worker
from torchtitan_rl.run.rank_status import StatusFile

class Patterns:
    def step(self):
        print("begun", flush=True)
        re.match(r"(a+)+$", "a" * 40 + "b")

StatusFile(0)
Worker().call(Future().result)  # waits
Worker().call(Patterns().step).result()
"""


def test_an_environment_that_holds_the_interpreters_lock_is_shown(tmp_path):
    variables = {**os.environ, rank_status.WATCH_VARIABLE: str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", HOLDS_THE_LOCK], env=variables, stdout=subprocess.PIPE) as rank:
        rank.stdout.readline()
        shown = Watchdog(tmp_path, print)._where(*read_statuses(tmp_path))
        rank.kill()
    _, environment = shown.split("an environment or tool, which may hold the interpreter's lock, is at:\n")
    assert re.search(r'File "<string>", line (9|10) in step', environment)
