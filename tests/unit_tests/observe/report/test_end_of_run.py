"""How a run ended is written on every exit, and each leaves a report that says so."""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.parts.report_runs import write_run
from torchtitan_rl import events, train
from torchtitan_rl.errors import TrainingStopped, UserError
from torchtitan_rl.observe.report import load_run
from torchtitan_rl.run.run_end import Phases, ensure_report, phase_of, write_end


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's folder and the config that asks for a report."""
    monkeypatch.setenv("RANK", "0")
    folder = write_run(tmp_path / "a", steps=5, num_steps=10)
    return folder, SimpleNamespace(metrics=SimpleNamespace(report=True))


def end_of(folder: Path) -> dict:
    return json.loads((folder / "end.json").read_text())


def raised(error: BaseException) -> BaseException:
    """The error with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


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
    folder, config = run
    phases = Phases()
    stop_listening = events.listen(phases)
    try:
        with events.heartbeat("step 6"), events.timed("grade"):
            raise error
    except BaseException as caught:
        train.write_failure(caught, folder)
    finally:
        stop_listening()
    train.write_run_report(config, folder)
    end = end_of(folder)
    assert (end["outcome"], end["code"], end["rank"], end["phase"]) == (outcome, code, 0, "step 6: grade")
    assert said in end["message"]
    assert said in (folder / "report.html").read_text("utf-8")


def test_error_after_another_has_its_phase_unless_it_hides_the_other():
    stop_listening = events.listen(Phases())
    try:
        with events.heartbeat("step 6"), events.timed("grade"):
            raise KeyError
    except KeyError as error:
        first = error
    stop_listening()
    later, hiding = RuntimeError(), RuntimeError()
    later.__context__ = hiding.__context__ = first
    hiding.__suppress_context__ = True  # as `raise hiding from None` sets it
    assert (phase_of(later), phase_of(hiding)) == ("step 6: grade", "")


def test_the_end_of_an_earlier_start_is_replaced_and_this_starts_own_stays(tmp_path):
    now = time.time()
    write_end(tmp_path, "done")
    os.utime(tmp_path / "end.json", (now - 20, now - 20))
    (tmp_path / "run.lock").touch()
    os.utime(tmp_path / "run.lock", (now - 10, now - 10))
    for outcome in ("killed", "failed"):
        write_end(tmp_path, outcome)
        assert end_of(tmp_path)["outcome"] == "killed"


def test_first_failing_rank_writes_the_end_and_ranks_that_lost_it_do_not(run):
    folder, _ = run
    train.write_failure(raised(RuntimeError("Connection closed by peer [127.0.0.1]:3")), folder)
    assert not (folder / "end.json").exists()
    write_end(folder, "killed", "out of memory", code=137, rank=1)
    write_end(folder, "failed", "later", code=1)
    assert end_of(folder)["message"] == "out of memory"
    assert sorted(path.name for path in folder.glob(".end*")) == []
    (folder / "end.json").unlink()  # as a resumed run does
    assert load_run(folder).end == {}


@pytest.mark.parametrize(
    ("stopped", "eval_only", "gives_up", "outcome", "said"),
    [
        (0, False, False, "done", ""),
        (0, True, False, "evaluated", ""),
        (0, False, True, "done", "stopped improving before step 5"),
        (signal.SIGINT, False, False, "stopped", "SIGINT after step 5; nothing is saved"),
        (signal.SIGTERM, False, False, "stopped", "SIGTERM after step 5; start again with --dump-folder"),
    ],
)
def test_completed_run_is_reported_as_completed(run, stopped, eval_only, gives_up, outcome, said):
    folder, _ = run
    if "start again" in said:
        (folder / "checkpoint" / "step-5").mkdir(parents=True)
    evaluation = SimpleNamespace(gives_up=gives_up)
    config = SimpleNamespace(eval_only=eval_only, evaluation=SimpleNamespace(best_by="evaluation/accuracy"))
    controller = SimpleNamespace(config=config, evaluation=evaluation, state=SimpleNamespace(step=5))
    train.write_outcome(controller, folder, int(stopped))
    assert end_of(folder)["outcome"] == outcome
    assert said in end_of(folder)["message"]


def test_the_launcher_writes_the_report_that_is_missing_or_older_than_the_end(run, capfd):
    folder, config = run
    train.write_run_report(config, folder)
    before = (folder / "report.html").stat().st_mtime
    os.utime(folder / "report.html", (before - 10, before - 10))
    write_end(folder, "killed", "out of memory, by the kernel's log", code=137, rank=1, phase="step 6: train")
    ensure_report(folder)
    assert "out of memory, by the kernel" in (folder / "report.html").read_text("utf-8")
    assert capfd.readouterr().out.endswith(f"report: {folder / 'report.html'}\n")  # as after a run that is done
    written = (folder / "report.html").stat().st_mtime_ns
    time.sleep(0.01)
    ensure_report(folder)
    assert (folder / "report.html").stat().st_mtime_ns == written
