import multiprocessing
import os
import socket
import subprocess

import pytest

from torchtitan_rl.core.errors import TrainingStopped, UserError
from torchtitan_rl.setup.run_folder import (
    RunFolderCheck,
    _check_shared,
    _lock,
    _lock_new,
    code_version,
)


def hold(folder, ready, release):
    lock = _lock(folder)
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
        _lock(tmp_path / "run")
    os.kill(other.pid, 9)  # however it ends
    other.join()
    _lock(tmp_path / "run").close()


def test_runs_that_begin_in_one_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHTITAN_RL_STARTED", "20260101-000000")
    first, second = _lock_new("debug"), _lock_new("debug")
    assert [lock.name for lock in (first, second)] == [
        f"outputs/debug-20260101-000000{suffix}/run.lock" for suffix in ("", "-2")
    ]
    first.close()
    assert _lock_new("debug").name == first.name  # torchrun has started its ranks again


def test_a_folder_that_cannot_be_made_names_the_field_and_the_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="dump_folder: cannot write to .*--dump-folder"):
        _lock(tmp_path / "file" / "run")


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
    _check_shared(tmp_path, "this run")
    for other in (tmp_path, tmp_path / "missing" / "run"):
        with pytest.raises(
            UserError, match=f"node {socket.gethostname()} does not see .*--dump-folder on a file system"
        ):
            _check_shared(other, "another run", patience_s=0.3)


def test_the_commit_of_the_code_and_whether_it_is_dirty(tmp_path):
    def git(*args):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        return subprocess.run(
            ["git", "-C", tmp_path, *identity, *args], check=True, capture_output=True, text=True
        ).stdout.strip()

    assert code_version(tmp_path) == {"commit": None, "dirty": None}
    git("init")
    (tmp_path / "code.py").write_text("1\n")
    git("add", ".")
    git("commit", "-m", "first")
    (tmp_path / "untracked").write_text("")
    assert code_version(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "code.py").write_text("2\n")
    assert code_version(tmp_path)["dirty"] is True
    (tmp_path / "installed").mkdir()
    assert code_version(tmp_path / "installed")["commit"] is None
