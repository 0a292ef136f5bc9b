"""examples/tutorial.ipynb runs from its first to its last cell, in a Jupyter kernel of this environment."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"
PACKAGES = ("nbclient==0.11.0", "ipykernel==7.4.0")
"""Installed by the test: a run needs neither."""
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
[parameters] = [cell for cell in notebook.cells if cell.source.startswith("STEPS, PROMPTS, HELD_OUT = ")]
parameters.source = "STEPS, PROMPTS, HELD_OUT = 2, 4, 8"
NotebookClient(notebook, timeout=1500, resources={"metadata": {"path": sys.argv[2]}}).execute()
nbformat.write(notebook, sys.argv[3])
"""


def text_of(cell: dict) -> str:
    """All that a cell has printed or shown as text."""
    found = []
    for output in cell["outputs"]:
        data = output.get("data", {})
        found += [output.get("text", ""), data.get("text/plain", ""), data.get("text/html", "")]
    return "".join("".join(text) for text in found)


def test_notebook_is_stored_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.long
def test_notebook_trains_shows_samples_evaluates_and_exports(tmp_path):
    install = [sys.executable, "scripts/uv.py", "pip", "install", "--python", sys.executable, "--target"]
    installed = subprocess.run(
        [*install, tmp_path / "packages", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if installed.returncode != 0:
        pytest.skip(f"nbclient cannot be installed here: {installed.stderr[-300:]}")
    # What the environment has comes first; the target also got copies of it.
    paths = os.pathsep.join([str(ROOT), str(tmp_path / "packages")])
    environment = {**os.environ, "PYTHONPATH": paths, "IPYTHONDIR": str(tmp_path / "ipython"), "OMP_NUM_THREADS": "1"}
    done = tmp_path / "done.ipynb"
    (ROOT / "outputs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "outputs") as folder:  # the notebook looks for run_train.sh above it
        command = [sys.executable, "-c", EXECUTE, NOTEBOOK, folder, done]
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    cells = [cell for cell in json.loads(done.read_text())["cells"] if cell["cell_type"] == "code"]
    trained, table, group, evaluated, exported = cells[-5:]
    assert any("image/png" in output.get("data", {}) for output in trained["outputs"])
    assert "response" in text_of(table)
    assert text_of(group).count("<p><b>") == 8
    assert "accuracy" in text_of(evaluated)
    assert "model.safetensors" in text_of(exported)
