"""The recorder's last act: the report beside the files it is made of."""

import pytest

from torchtitan_rl.observability import Recorder, record_metric
from torchtitan_rl.report import page
from torchtitan_rl.train import write_report


@pytest.fixture
def finished(tmp_path):
    """Makes a run of two steps that has ended."""

    def make(rank=0, **config):
        recorder = Recorder(
            Recorder.Config(sinks=["jsonl"], **config),
            run_folder=tmp_path,
            run_name="a",
            run_config={},
            total_steps=2,
            rank=rank,
            at_end=write_report,
        )
        for step in (1, 2):
            record_metric("reward/mean", float(step))
            recorder.flush(step)
        recorder.close()
        return tmp_path / "report.html"

    return make


def test_a_run_ends_with_its_report_and_says_where_it_is(finished, capsys):
    path = finished()
    assert "reward rose from 1 to 2" in path.read_text("utf-8")
    assert f"report: {path}" in capsys.readouterr().out


def test_other_ranks_and_runs_that_want_none_write_none(finished):
    assert not finished(report=False).exists()
    assert not finished(rank=1).exists()


def test_a_report_that_fails_costs_a_line_in_the_log(finished, monkeypatch, caplog):
    monkeypatch.setattr(page, "load_run", lambda *_: 1 / 0)
    assert not finished().exists()
    assert "the report could not be written" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_a_folder_that_is_gone_costs_one_line_and_no_traceback(finished, monkeypatch, caplog):
    def gone(*_):
        raise FileNotFoundError("outputs/a holds neither metrics.jsonl nor samples.jsonl")

    monkeypatch.setattr(page, "load_run", gone)
    assert not finished().exists()
    assert "the report could not be written (outputs/a holds neither" in caplog.text
    assert "Traceback" not in caplog.text
