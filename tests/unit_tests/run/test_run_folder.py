import multiprocessing
import os
import socket
from pathlib import Path

import pytest

from torchtitan_rl.command.registry import config_file, load_config
from torchtitan_rl.errors import TrainingStopped, UserError
from torchtitan_rl.run.dump_folder import check_dump_folder, create
from torchtitan_rl.run.run_end import write_end
from torchtitan_rl.run.run_folder import (
    RunFolder,
    RunFolderCheck,
    check_shared,
    take_new,
)


def content(folder):
    """Every file of a folder, with what it holds and when it was changed."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def hold(folder, ready, release):
    lock = create(folder)
    ready.set()
    release.wait()
    lock.close()


def test_a_folder_in_use_is_refused_until_the_other_run_ends(tmp_path):
    spawn = multiprocessing.get_context("fork")
    ready, release = spawn.Event(), spawn.Event()
    other = spawn.Process(target=hold, args=(tmp_path / "run", ready, release))
    other.start()
    ready.wait()
    with pytest.raises(UserError, match="dump_folder: another run is using"):
        create(tmp_path / "run")
    os.kill(other.pid, 9)  # however it ends
    other.join()
    create(tmp_path / "run").close()


def test_runs_that_begin_in_one_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20260101-000000")
    first, second = (take_new("debug", create)[1] for _ in range(2))
    assert [lock.name for lock in (first, second)] == [
        f"outputs/debug-20260101-000000{suffix}/run.lock" for suffix in ("", "-2")
    ]
    first.close()
    assert take_new("debug", create)[1].name == first.name


def test_a_folder_that_another_run_has_taken_ends_this_one_at_its_next_step(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.lock").write_text("this run")
    check = RunFolderCheck(run)
    check()
    run.rename(tmp_path / "moved")
    with pytest.raises(TrainingStopped, match="has vanished"):
        check()
    run.mkdir()
    (run / "run.lock").write_text("another run")
    with pytest.raises(TrainingStopped, match="is another run's now: it was moved away, or"):
        check()


def test_a_node_that_sees_another_folder_is_named(tmp_path):
    (tmp_path / "run.lock").write_text("this run")
    check_shared(tmp_path, "this run")
    for other in (tmp_path, tmp_path / "missing" / "run"):
        with pytest.raises(
            UserError, match=f"node {socket.gethostname()} does not see .*--dump-folder on a file system"
        ):
            check_shared(other, "another run", patience_s=0.3)


OTHERS = {
    "a model's": (["config.json", "model.safetensors"], "it is a model's folder, with config.json, model.safetensors"),
    "one of data": (["train.jsonl"], "it has train.jsonl"),
    "one of many files": (list("abcdef"), "it has a, b, c, d and 2 more"),
    "a repository": ([".git", "setup.py"], r"it has .git, setup.py"),
    "one with runs": (["run/config.json"], "it has run"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_folder_with_something_else_is_refused_by_name_and_nothing_is_written(other, tmp_path, one_rank):
    names, says = OTHERS[other]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("theirs")
    before = content(tmp_path)
    for write in (check_dump_folder, create_at, lambda folder: RunFolder.find(folder, "debug")):
        with pytest.raises(UserError, match=f"dump_folder = .*new, empty or a run's own, but {says}. .*a new folder"):
            write(str(tmp_path))
    assert content(tmp_path) == before
    check_dump_folder(str(tmp_path / "new" / "run"))


def create_at(folder):
    create(Path(folder))


def test_a_start_that_is_refused_before_it_begins_leaves_a_finished_run_as_it_was(tmp_path, one_rank):
    config = load_config("debug")

    def start(*, refused):
        folder = RunFolder.find(str(tmp_path / "run"), "debug")
        folder.claim()
        if not refused:
            folder.begin("debug", config, config_file("debug"))
        folder._lock.close()  # as its process ends
        return folder.continues

    assert not start(refused=False)
    write_end(tmp_path / "run", "done")
    before = {path: text for path, text in content(tmp_path).items() if path.name != "run.lock"}
    assert start(refused=True)
    assert {path: text for path, text in content(tmp_path).items() if path.name != "run.lock"} == before
    assert start(refused=False)
    assert not (tmp_path / "run" / "end.json").exists()
    assert (tmp_path / "run" / "config-1.json").exists()
