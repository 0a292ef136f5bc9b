"""The script of a first day on a GPU goes on after hangs, crashes and nonsense."""

import json
import sys
import time
from pathlib import Path

import pytest

from tests.gpu_first_day import LIMIT_S, RUNS, Run, take

ROOT = Path(__file__).parents[2]
HANGS = ["sh", "-c", "sleep 600 & echo child $!; wait"]


def python(name: str, code: str, seconds: float = 20, **more) -> Run:
    return Run(name, [sys.executable, "-c", code], seconds, **more)


def test_after_a_fault_of_a_run_its_processes_are_gone_and_the_next_begins(tmp_path, capsys):
    faults = [
        Run("hangs", HANGS, 4.0),
        python("crashes", "raise SystemExit(3)"),
        python("nonsense", "print('no json')", tell=json.loads),
        Run("absent", ["/no/such/program"], 5),
    ]
    assert take([*faults, python("next", "print('fine')", tell=str.splitlines)], tmp_path) == len(faults)
    output = capsys.readouterr().out
    assert [line.split(":")[0] for line in output.splitlines() if line.startswith("FAIL")] == [
        f"FAIL {run.name}" for run in faults
    ]
    assert "killed after 4 s" in output
    assert output.endswith("PASS next\n     fine\n")
    head, _, row = (tmp_path / "report.md").read_text().splitlines()
    assert (head.count("|"), row) == (3, "| next | fine |")
    child = int((tmp_path / "hangs.log").read_text().split()[1])
    deadline = time.monotonic() + 10
    command = Path(f"/proc/{child}/cmdline")
    while command.exists() and command.read_bytes():  # a zombie's is empty
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("part", RUNS)
def test_the_runs_of_each_part_name_files_that_exist(part, tmp_path):
    for size in ("0.6B", "small"):
        for run in RUNS[part](size, tmp_path):
            assert run.seconds <= LIMIT_S
            program = run.command[1] if run.command[1] != "-m" else None
            assert program is None or (ROOT / program).is_file(), run.command
