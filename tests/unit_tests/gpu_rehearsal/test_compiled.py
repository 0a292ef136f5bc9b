"""The trainer compiled as on a GPU but for the generated code (tests/gpu_rehearsal/compiled.py): whole graphs, few, equal to eager."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_rehearsal.case_names import CASE_NAMES, QUICK

ROOT = Path(__file__).parents[3]
MOST_GRAPHS = 20
"""Of forwards and backwards of the blocks and the head's passes together, over steps of six shapes."""


def report_of(folder: Path, names: list[str]) -> dict[str, dict]:
    file = folder / "compiled.json"
    started = ("TORCHTITAN", "TORCHELASTIC", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "VLLM", "TORCH_COMPILE")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(started)}
    command = [sys.executable, "-m", "tests.gpu_rehearsal.compiled", str(file), *names]
    done = subprocess.run(command, cwd=ROOT, env=clean | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert file.exists(), done.stderr[-3000:]
    return json.loads(file.read_text())


def check(found: dict) -> None:
    assert "error" not in found, found["error"]
    assert found["difference"] <= found["bound"]
    assert found["breaks"] == 0
    assert found["graphs"][-1] == found["graphs"][-3], "the last two shapes were compiled anew"
    assert found["graphs"][-1] <= MOST_GRAPHS


def test_quick_cases_compile_to_few_whole_graphs_equal_to_eager(tmp_path):
    report = report_of(tmp_path, QUICK)
    assert list(report) == QUICK
    for found in report.values():
        check(found)


@pytest.mark.long
def test_every_case_compiles_to_few_whole_graphs_equal_to_eager(tmp_path):
    report = report_of(tmp_path, [])
    assert list(report) == CASE_NAMES
    for found in report.values():
        check(found)
