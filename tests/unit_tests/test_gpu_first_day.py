"""The script of a first day on a GPU goes on after hangs, crashes and nonsense, and needs nothing that such a machine may lack."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.bench import step_vs_trl
from tests import gpu_first_day
from tests.gpu_first_day import PARTS, RUNS, Report, Run, take

ROOT = Path(__file__).parents[2]
LIMIT_S = 4.0
"""For a run that hangs: a busy machine takes seconds to start Python."""
HANGS = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print('child', p.pid, flush=True); time.sleep(600)"  # noqa: E501


def python(name: str, code: str, seconds: float = 20, **more) -> Run:
    return Run(name, [sys.executable, "-c", code], seconds, **more)


def said(tmp_path: Path, runs: list[Run], limit_s: float = 60) -> tuple[Report, list[str]]:
    report = Report(tmp_path / "report.txt", limit_s)
    take(report, runs, tmp_path)
    return report, (tmp_path / "report.txt").read_text().splitlines()


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().split()[2] != "Z"


def test_a_hanging_run_and_its_children_are_killed_and_the_next_begins(tmp_path):
    begin = time.monotonic()
    hanging = python("hangs", HANGS, LIMIT_S)
    report, lines = said(tmp_path, [hanging, python("next", "print('fine')", tell=str.splitlines)])
    assert time.monotonic() - begin < 30
    assert report.failed == 1
    assert re.match(r"FAIL hangs: not done in \d+ s, killed", lines[0])
    assert [lines[-2].split(" in ")[0], lines[-1].strip()] == ["PASS next", "fine"]
    child = int((tmp_path / "hangs.log").read_text().split()[1])
    deadline = time.monotonic() + 10
    while is_alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    "run",
    [
        python("crashes", "raise SystemExit(3)"),
        python("killed", "import os; os.kill(os.getpid(), 9)"),
        python("nonsense", "print('no json')", tell=lambda text: [gpu_first_day.json.loads(text)["x"]]),
        Run("absent", ["/no/such/program"], 5),
    ],
    ids=lambda run: run.name,
)
def test_a_fault_of_a_run_is_reported_and_the_next_begins(tmp_path, run):
    report, lines = said(tmp_path, [run, python("next", "pass")])
    assert report.failed == 1
    assert lines[0].startswith(f"FAIL {run.name}: ")
    assert lines[-1].startswith("PASS next in")


@pytest.mark.parametrize("part", PARTS)
def test_the_runs_of_each_part_name_files_and_options_that_exist(part, tmp_path):
    for size in ("0.6B", "small"):
        for run in RUNS[part](size, tmp_path):
            assert run.seconds <= gpu_first_day.LIMIT_S
            program = run.command[1] if run.command[1] != "-m" else None
            assert program is None or (ROOT / program).is_file(), run.command


@pytest.mark.long
def test_trl_takes_steps_with_the_engine_of_this_environment(tmp_path, monkeypatch):
    """With the settings of the part `trl`, and TRL's colocated engine, which a GPU has: TRL names no vLLM as new as ours."""
    monkeypatch.setattr(step_vs_trl, "BENCH", tmp_path)
    [run] = RUNS["trl"]("0.6B", tmp_path)
    job = {
        "model": str(step_vs_trl.checkpoint("tiny", ragged=False)),
        "config": "debug",
        "ends": False,
        "folder": str(tmp_path),
        "prompts": [f"What is {n} + 12?\n" for n in range(10, 22)],
        "prompts_per_step": 4,
        "n": 4,
        "new_tokens": 8,
        "threads": 1,
        "trl": step_vs_trl.settings(step_vs_trl.TRL, run.command[run.command.index("--trl") + 1 :]),
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "tests/gpu_rehearsal/trl_side.py", str(tmp_path / "job.json")]
    done = subprocess.run(command, cwd=ROOT, input="step\nstep\n", capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    ready, *steps = map(json.loads, done.stdout.splitlines())
    assert ready == {}
    assert [step["lengths"] for step in steps] == [[8, 8, 8]] * 2
    assert all(step["phases"]["generate"] > 0 for step in steps)
