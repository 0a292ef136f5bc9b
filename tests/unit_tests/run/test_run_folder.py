"""Which folders a run may write to, and that it is the only one that does."""

import errno
import json
import multiprocessing
import os
import resource
import signal
import socket
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchtitan_rl.command.registry import load_config
from torchtitan_rl.command.train import train_run
from torchtitan_rl.errors import TrainingStopped, UserError
from torchtitan_rl.run.checkpoint_folder import Resume
from torchtitan_rl.run.dump_folder import check_dump_folder, lock, new_folder, unlock
from torchtitan_rl.run.rank_status import StatusFile
from torchtitan_rl.run.run_end import write_end
from torchtitan_rl.run.run_folder import RunFolder, RunFolderCheck, check_shared


def content(folder):
    """Every file of a folder but its lock, with what it holds and when it was changed."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "run.lock"]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_a_folder_is_one_runs_until_it_ends_though_a_forked_process_lives_on(tmp_path, one_rank):
    folder = RunFolder.claim(str(tmp_path / "run"), "debug")
    forked = multiprocessing.get_context("fork").Process(target=multiprocessing.Event().wait, daemon=True)
    forked.start()
    with pytest.raises(UserError, match="dump_folder: another run is using"):
        lock(tmp_path / "run")
    folder.close()
    lock(tmp_path / "run").close()
    forked.kill()


def test_runs_that_begin_in_one_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20260101-000000")
    folders = [new_folder("debug") for _ in range(3)]
    assert folders == [Path(f"outputs/debug-20260101-000000{suffix}") for suffix in ("", "-2", "-3")]


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
        with pytest.raises(UserError, match=f"node {socket.gethostname()} does not see .*--dump-folder on a file"):
            check_shared(other, "another run", patience_s=0.3)


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["config.json", "model.safetensors"], "it has config.json, model.safetensors"),
        (list("abcdef"), "it has a, b, c, d"),
        (["run/config.json"], "it has run"),
    ],
)
def test_a_folder_with_something_else_is_refused_by_name_and_nothing_is_written(names, shown, tmp_path, one_rank):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("theirs")
    before = sorted(tmp_path.rglob("*"))
    for refuse in (check_dump_folder, lambda folder: RunFolder.claim(folder, "debug")):
        with pytest.raises(UserError, match=f"dump_folder = .*new, empty or a run's own, but {shown}. .*a new folder"):
            refuse(str(tmp_path))
    assert sorted(tmp_path.rglob("*")) == before
    check_dump_folder(str(tmp_path / "new" / "run"))


def test_a_start_that_is_refused_before_it_begins_leaves_a_finished_run_as_it_was(tmp_path, one_rank):
    config = load_config("debug")
    resume = Resume(checkpoint=tmp_path / "step-3", step=3, fork=False, changed={"seed": "0 -> 1"})

    def start(*, refused):
        folder = RunFolder.claim(str(tmp_path / "run"), "debug")
        if not refused:
            folder.begin("debug", config, resume if folder.continues else None)
        folder._lock_file.close()  # as its process ends
        return folder.continues

    assert not start(refused=False)
    write_end(tmp_path / "run", "done")
    before = content(tmp_path)
    assert start(refused=True)
    assert content(tmp_path) == before
    assert start(refused=False)
    assert not (tmp_path / "run" / "end.json").exists()
    starts = [json.loads((tmp_path / "run" / name).read_text()) for name in ("config-1.json", "config.json")]
    assert [start.get("resumed") for start in starts] == [None, {"step": 3, "changed": {"seed": "0 -> 1"}}]


def test_a_start_on_a_full_disk_leaves_what_the_run_was_started_with(tmp_path, one_rank, monkeypatch):
    folder, config = RunFolder.claim(str(tmp_path / "run"), "debug"), load_config("debug")
    folder.begin("debug", config)
    folder.close()
    before = (tmp_path / "run" / "config.json").read_text()
    again = RunFolder.claim(str(tmp_path / "run"), "debug")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(signal, "SIGXFSZ", signal.signal(signal.SIGXFSZ, signal.SIG_IGN), raising=False)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(UserError, match="dump_folder: cannot write to"):
            again.begin("debug", config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "run" / "config.json").read_text() == before
    again.close()


def test_other_nodes_can_see_at_once_who_has_claimed_a_folder(tmp_path, one_rank, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.readlink(f"/proc/self/fd/{number}")))
    RunFolder.claim(str(tmp_path / "run"), "debug").close()
    assert synced == [str(tmp_path / "run" / "run.lock")]


def test_a_file_system_without_locks_is_named_and_used(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))  # as Lustre mounted without -o flock

    monkeypatch.setattr("fcntl.flock", refuse)
    unlock(lock(tmp_path / "run"))
    assert "its file system has no locks, so a second run there would end this one" in capsys.readouterr().out


def test_a_run_whose_folder_another_has_taken_leaves_the_end_to_it(tmp_path, one_rank, monkeypatch):
    def take(config, path, **_):
        check = RunFolderCheck(path)
        (path / "run.lock").write_text("another run")
        check()

    config = load_config("debug")
    config.dump_folder = str(tmp_path / "run")
    resolved = SimpleNamespace(config=config, algorithm=None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("torchtitan_rl.build.prepare", lambda _: resolved)
    monkeypatch.setattr("torchtitan_rl.build.build_run", take)
    monkeypatch.setattr("torchtitan_rl.run.resume.agreed_fields", lambda *_: {})
    status_file, output = StatusFile(0), SimpleNamespace(to_file=lambda _: None)
    with ExitStack() as cleanup, pytest.raises(TrainingStopped, match="is another run's now"):
        train_run("debug", config, output, status_file, cleanup)
    assert status_file.status.run_folder == ""
