"""docs/observability.md: the example of an own sink runs, and a resumed run writes no step twice."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from torchtitan_rl.observability import Recorder, record_metric
from torchtitan_rl.observability.sinks import SINKS

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture
def csv_sink(tmp_path, monkeypatch):
    """The documented example, imported."""
    (code,) = re.findall(r"```python\n# my_sink.py\n(.*?)```", (DOCS / "observability.md").read_text(), re.DOTALL)
    (tmp_path / "my_sink.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("my_sink")
    yield
    sys.modules.pop("my_sink")
    SINKS.pop("csv")


def record(folder, steps, resumed_after=None):
    run = Recorder(Recorder.Config(sinks=["csv"]), run_folder=folder, run_name="own sink", run_config={}, total_steps=9)
    if resumed_after is not None:
        run.load_state_dict({"next_step": resumed_after + 1})
    for step in steps:
        record_metric("reward/mean", float(step))
        run.flush(step)
    run.close()


def test_documented_sink_has_each_step_once_after_a_resume(csv_sink, tmp_path):
    record(tmp_path, [1, 2, 3, 4])
    record(tmp_path, [3, 4, 5], resumed_after=2)
    lines = (tmp_path / "reward.csv").read_text().split()
    assert lines == ["1,1.0", "2,2.0", "3,3.0", "4,4.0", "5,5.0"]
