"""The trainer compiled as on a GPU but for the generated code (tests/gpu_rehearsal/compiled.py): whole graphs, few, equal to eager."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_rehearsal.cases import CASES, QUICK
from tests.gpu_rehearsal.native import clean_environment

ROOT = Path(__file__).parents[3]
MOST_GRAPHS = 20
"""Of forwards and backwards of the blocks and the head's passes together, over steps of six shapes."""


@pytest.mark.parametrize("names", [QUICK, pytest.param(list(CASES), marks=pytest.mark.long)], ids=["quick", "all"])
def test_cases_compile_to_few_whole_graphs_equal_to_eager(tmp_path, names):
    file = tmp_path / "compiled.json"
    command = [sys.executable, "-m", "tests.gpu_rehearsal.compiled", str(file), *names]
    done = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
    assert file.exists(), done.stderr[-3000:]
    report = json.loads(file.read_text())
    assert list(report) == names
    for case in report.values():
        assert "error" not in case, case["error"]
        assert case["difference"] <= case["bound"]
        assert case["breaks"] == 0
        assert case["graphs"][-1] == case["graphs"][-3], "the last two shapes were compiled anew"
        assert case["graphs"][-1] <= MOST_GRAPHS
