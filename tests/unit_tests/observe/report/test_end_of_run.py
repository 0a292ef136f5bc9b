"""How a run ended is written on every exit, and each leaves a report that says so."""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.parts.report_runs import write_run
from torchtitan_rl import events
from torchtitan_rl.command import train
from torchtitan_rl.errors import TrainingStopped, UserError
from torchtitan_rl.run.run_end import has_report, phase_of, write_end, write_run_report


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's folder."""
    monkeypatch.setenv("RANK", "0")
    return write_run(tmp_path / "a", steps=5, num_steps=10)


def end_of(folder: Path) -> dict:
    return json.loads((folder / "end.json").read_text())


@pytest.mark.parametrize(
    ("error", "outcome", "code", "said"),
    [
        (UserError("grader.limit = 3: expected 4"), "failed", 2, "grader.limit = 3: expected 4"),
        (TrainingStopped("the log-probs differ"), "stopped", 3, "the log-probs differ"),
        (ZeroDivisionError("in a reward"), "failed", 1, "ZeroDivisionError: in a reward"),
        (KeyboardInterrupt(), "failed", 130, "interrupted"),
    ],
)
def test_error_is_written_with_its_phase_and_shown_in_the_report(run, error, outcome, code, said):
    try:
        with events.heartbeat("step 6"), events.timed("grade"):
            raise error
    except BaseException as caught:
        train.write_failure(caught, run)
    end = end_of(run)
    assert (end["outcome"], end["code"], end["rank"], end["phase"]) == (outcome, code, 0, "step 6: grade")
    assert said in end["message"]
    assert said in (run / "report.html").read_text("utf-8")


def test_error_after_another_has_its_phase_unless_it_hides_the_other():
    try:
        with events.heartbeat("step 6"), events.timed("grade"):
            raise KeyError
    except KeyError as error:
        first = error
    later, hiding, its_own_cause = RuntimeError(), RuntimeError(), RuntimeError()
    later.__context__ = hiding.__context__ = first
    hiding.__suppress_context__ = True  # as `raise hiding from None` sets it
    its_own_cause.__cause__ = its_own_cause  # as `raise error from error` sets it
    assert (phase_of(later), phase_of(hiding), phase_of(its_own_cause)) == ("step 6: grade", "", "")


def refuse_links(*_):
    raise PermissionError(1, "Operation not permitted")  # as exFAT and Google Drive say it


@pytest.mark.parametrize("set_back_s", [0, 3600])
@pytest.mark.parametrize("has_links", [True, False])
def test_the_first_end_of_a_start_stays_and_that_of_an_earlier_start_is_replaced(
    run, monkeypatch, set_back_s, has_links
):
    if not has_links:
        monkeypatch.setattr(os, "link", refuse_links)
    (run / "run.lock").write_text("first start")
    write_end(run, "done")
    (run / "run.lock").write_text("second start")
    now = time.time()
    os.utime(run / "run.lock", (now + set_back_s,) * 2)  # the clock has been set back since
    write_end(run, "killed", "out of memory", code=137, rank=1)
    write_end(run, "failed", "later", code=1)
    assert end_of(run)["message"] == "out of memory"
    assert list(run.glob(".end*")) == []


@pytest.mark.parametrize(
    ("stopped", "eval_only", "gives_up", "outcome", "said"),
    [
        (0, False, False, "done", ""),
        (0, True, False, "evaluated", ""),
        (0, False, True, "done", "stopped improving before step 5"),
        (signal.SIGINT, False, False, "stopped", "SIGINT after step 5; nothing is saved"),
        (signal.SIGTERM, False, False, "stopped", "SIGTERM after step 5; the same command with --dump-folder"),
        (signal.SIGTERM, False, False, "stopped", "SIGTERM after step 5; all its steps are done"),
    ],
)
def test_completed_run_is_reported_as_completed(run, stopped, eval_only, gives_up, outcome, said):
    if "--dump-folder" in said:
        (run / "checkpoint" / "step-5").mkdir(parents=True)
    evaluation = SimpleNamespace(gives_up=gives_up)
    num_steps = 5 if "all its steps" in said else 9
    config = SimpleNamespace(
        num_steps=num_steps, eval_only=eval_only, evaluation=SimpleNamespace(best_by="evaluation/accuracy")
    )
    controller = SimpleNamespace(config=config, evaluation=evaluation, state=SimpleNamespace(step=5))
    train.write_outcome(controller, run, int(stopped))
    assert end_of(run)["outcome"] == outcome
    assert said in end_of(run)["message"]


def test_a_report_that_is_older_than_the_end_is_none_of_it(run, capfd):
    write_run_report(run)
    os.utime(run / "report.html", (time.time() - 10,) * 2)
    write_end(run, "killed", "out of memory, by the kernel's log", code=137, rank=1, phase="step 6: train")
    assert not has_report(run)
    write_run_report(run)
    assert has_report(run)
    assert "out of memory, by the kernel" in (run / "report.html").read_text("utf-8")
    assert capfd.readouterr().out.endswith(f"report: {run / 'report.html'}\n")
