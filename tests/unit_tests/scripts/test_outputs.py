"""Scripts with an --output overwrite what they have written themselves, and nothing else."""

import json
import sys

import pytest

from scripts import make_arrivals, make_random_checkpoint, plot_run
from torchtitan_rl.command.command import main as command
from torchtitan_rl.observe.report.__main__ import main as report

MAINS = {
    "export": lambda: command(["export", *sys.argv[1:]]),
    "make_arrivals": make_arrivals.main,
    "make_random_checkpoint": make_random_checkpoint.main,
    "plot_run": plot_run.main,
    "report": report,
}


def run_script(name, *arguments, monkeypatch):
    monkeypatch.setattr("sys.argv", [name, *map(str, arguments)])
    return MAINS[name]()


@pytest.fixture
def run(tmp_path):
    """A run's folder, as far as these scripts read it before they look at --output."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hf_assets_path": str(folder), "config": "debug", "command": [""]}))
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    return folder


@pytest.mark.parametrize("name", MAINS)
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_another_file_or_folder_is_refused_by_name_and_stays_as_it_is(run, tmp_path, monkeypatch, capsys, name, kind):
    output = tmp_path / "theirs"
    theirs = output
    if kind == "folder":
        output.mkdir()
        theirs = output / "model.safetensors"
    theirs.write_text("theirs")
    source = {"make_arrivals": [], "make_random_checkpoint": []}.get(name, [run])
    try:
        code = run_script(name, *source, "--output", output, monkeypatch=monkeypatch)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert "--output" in capsys.readouterr().err
    assert theirs.read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir() if path not in (output, run)] == []
