"""A disk that is full for a while, and files that somebody deletes: what is lost is said, in one line, and nothing else is."""

import logging
import resource
from contextlib import contextmanager

import pytest

from torchtitan_rl.errors import UserError
from torchtitan_rl.observe import record_metric
from torchtitan_rl.observe.line_file import read_lines
from torchtitan_rl.observe.observer import RunObserver
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


def settle(run) -> None:
    """Wait until the sinks have done what they can."""
    for sink_thread in run.sinks.values():
        sink_thread._queue.join()


def step(run, number: int) -> None:
    record_metric("loss", 0.5)
    run.flush(number)
    settle(run)


def steps_of(folder) -> list[int]:
    return [line["step"] for line in read_lines(folder / "metrics.jsonl", b"\n")]


def test_steps_wait_for_disk_space_and_are_written_in_order(recorder, tmp_path, caplog):
    run = recorder()
    with caplog.at_level(logging.WARNING):
        step(run, 1)
        with no_space_over((tmp_path / "metrics.jsonl").stat().st_size + 20):
            for number in (2, 3, 4):
                step(run, number)
            assert not run.sinks["jsonl"].drain(0.01)  # a checkpoint says that steps are not written
        step(run, 5)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5]
    said = [r for r in caplog.records if "sink jsonl" in r.getMessage()]
    assert ["steps wait to be written again" in r.getMessage() for r in said] == [True, False]
    assert "writes again: 3 steps were written late, 0 are lost" in said[1].getMessage()
    assert not any(r.exc_info for r in said)


def test_evaluation_without_disk_space_is_a_warning_and_leaves_no_file(tmp_path, caplog):
    observer = RunObserver(None, algorithm=None, prompts=None, token_flops=None, run_folder=tmp_path)
    observer.write_evaluation(4, {"metrics": {"evaluation/accuracy": 0.5}, "failures": {}})
    with no_space_over(10):
        observer.write_evaluation(4, {"metrics": {"evaluation/accuracy": 0.7}, "failures": {}})
    assert "evaluation/step-4.json is not written: [Errno 27] File too large; the run continues" in caplog.text
    assert list((tmp_path / "evaluation").iterdir()) == []


def test_full_disk_at_the_start_is_a_user_error(one_rank, tmp_path):
    with no_space_over(0), pytest.raises(UserError, match="dump_folder: cannot write to .*run: File too large"):
        RunFolder.claim(str(tmp_path / "run"), "debug")
