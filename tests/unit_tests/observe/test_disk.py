"""A disk that is full for a while, and files that somebody deletes: what is lost is said, in one line, and nothing else is."""

import resource
from contextlib import contextmanager

import pytest

from torchtitan_rl.errors import UserError
from torchtitan_rl.observe import record_metric
from torchtitan_rl.observe.evaluation_results import write_results
from torchtitan_rl.observe.line_file import read_lines
from torchtitan_rl.run.run_folder import RunFolder


@contextmanager
def no_space_over(size: int):
    """This process may write no file beyond `size` bytes: the kernel's own refusal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def step(run, number: int) -> None:
    record_metric("loss", 0.5)
    run.flush(number)


def steps_of(folder) -> list[int]:
    return [line["step"] for line in read_lines(folder / "metrics.jsonl", b"\n")]


def test_steps_wait_for_disk_space_and_are_written_in_order(recorder, tmp_path, caplog):
    run = recorder()
    sink_thread = run.sinks["jsonl"]
    step(run, 1)
    assert sink_thread.drain(10)
    with no_space_over((tmp_path / "metrics.jsonl").stat().st_size + 20):
        for number in (2, 3, 4):
            step(run, number)
        assert not sink_thread.drain(0.5)  # a checkpoint says that steps are not written
    step(run, 5)
    assert sink_thread.drain(10)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5]
    messages = [r.getMessage() for r in caplog.records if "sink jsonl" in r.getMessage()]
    assert ["waits until it can write again" in message for message in messages] == [True, False]
    assert messages[1] == "sink jsonl writes again; 0 steps are lost so far"


def test_a_disk_that_is_full_at_the_end_loses_the_waiting_steps_in_one_line(recorder, tmp_path, caplog):
    run = recorder()
    step(run, 1)
    assert run.sinks["jsonl"].drain(10)
    with no_space_over((tmp_path / "metrics.jsonl").stat().st_size + 20):
        step(run, 2)
        step(run, 3)
        run.close()
    assert steps_of(tmp_path) == [1]
    assert "2 waiting steps are lost. OSError: [Errno 27] File too large" in caplog.text


def test_evaluation_without_disk_space_is_a_warning_and_leaves_no_file(tmp_path, caplog):
    results = {"metrics": {"evaluation/accuracy": 0.5}, "failures": {}}
    write_results(tmp_path / "evaluation", 4, results)
    with no_space_over(10):
        write_results(tmp_path / "evaluation", 4, results)
    assert "evaluation/step-4.json is not written: [Errno 27] File too large; the run continues" in caplog.text
    (tmp_path / "evaluation").rmdir()
    (tmp_path / "evaluation").write_text("a file, where removing anything fails as on a stale mount")
    write_results(tmp_path / "evaluation", 4, results)
    assert "evaluation/step-4.json is not written: [Errno 17]" in caplog.text


def test_full_disk_at_the_start_is_a_user_error(one_rank, tmp_path):
    with no_space_over(0), pytest.raises(UserError, match="dump_folder: cannot write to .*run: File too large"):
        RunFolder.claim(str(tmp_path / "run"), "debug")
