"""The pool's own processes. What calls do is in core/grading/test_calls.py."""

import gc
import os
from pathlib import Path

from torchtitan_rl.run.workers import WorkerPool


class LeavesAMark:
    """Refers to itself, so that only the garbage collector destroys it. It notes which process did."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.myself = folder, self

    def __del__(self) -> None:
        (self.folder / str(os.getpid())).touch()


def collect() -> int:
    gc.collect()
    return os.getpid()


def test_garbage_of_the_parent_is_not_destroyed_in_a_worker(tmp_path):
    """The destructor of torch's process group, for one, waits there for ever."""
    gc.collect()
    gc.disable()
    try:
        LeavesAMark(tmp_path)
        pool = WorkerPool([collect], size=1)
        assert pool.submit(0).result() != os.getpid()
        pool.close()
        assert not list(tmp_path.iterdir())
    finally:
        gc.enable()
    gc.collect()
    assert [mark.name for mark in tmp_path.iterdir()] == [str(os.getpid())]


def print_evil() -> None:
    print("\x1b[2J\x1b[31m evil\rgood")


def test_what_a_call_prints_commands_no_terminal(capsys):
    pool = WorkerPool([print_evil], size=1)
    pool.submit(0).result()
    pool.close()
    assert capsys.readouterr().out == "\\x1b[2J\\x1b[31m evil\\rgood\n"
