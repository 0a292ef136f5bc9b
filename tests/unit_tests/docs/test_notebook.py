"""examples/tutorial.ipynb runs from its first to its last cell, in a Jupyter kernel of this environment."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parts.talk import save_talker

ROOT = Path(__file__).parents[3]
NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"
PACKAGES = ("nbclient==0.11.0", "ipykernel==7.4.0")
"""Installed by the test: a run needs neither."""
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
[parameters] = [cell for cell in notebook.cells if cell.source.startswith("MODEL, STEPS, PROMPTS, HELD_OUT = ")]
parameters.source = f"MODEL, STEPS, PROMPTS, HELD_OUT = {sys.argv[4]!r}, 2, 4, 8"
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
def test_notebook_trains_shows_curves_and_samples_chats_and_exports(tmp_path):
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
    model = save_talker(tmp_path / "talker", max_seq_len=1024)
    command = [sys.executable, "-c", EXECUTE, NOTEBOOK, tmp_path, done, model]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    cells = [cell for cell in json.loads(done.read_text())["cells"] if cell["cell_type"] == "code"]
    trained, curves, before_and_after, lowest, answer, _ = cells[-6:]
    assert "step 2/2" in text_of(trained)
    assert any("image/png" in output.get("data", {}) for output in curves["outputs"])
    assert text_of(before_and_after).count("<th>") >= 8
    assert "response" in text_of(lowest)
    assert text_of(answer)
    assert (tmp_path / "outputs" / "exported" / "config.json").is_file()
