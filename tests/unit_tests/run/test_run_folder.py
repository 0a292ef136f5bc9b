import multiprocessing
import os

import pytest

from torchtitan_rl.run.errors import UserError
from torchtitan_rl.run.folder import _lock


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


def test_a_folder_that_cannot_be_made_names_the_field_and_the_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="dump_folder: cannot write to .*--dump-folder"):
        _lock(tmp_path / "file" / "run")
