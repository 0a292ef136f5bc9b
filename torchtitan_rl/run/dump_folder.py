"""Which folders a run may write to: a new one, an empty one, or a run's own; and its lock. It imports no torch."""

import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from torchtitan_rl.errors import UserError, expect
from torchtitan_rl.events import progress
from torchtitan_rl.run.run_end import LOCK

CHECKOUT = Path(__file__).resolve().parents[2]

NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Errors of `flock` on file systems without locks, as of Lustre without `-o flock`, and NFS without a lock server."""

_PARTS = ("logs", "checkpoint")
"""Folders that every run's folder has."""

_MADE_BEFORE = {*_PARTS, "lost+found"}
"""Names that a folder may have before its run: a link to another disk, a new disk's own."""


def check_dump_folder(folder: str) -> None:
    """Check that `folder` is new, empty or a run's own. Writes nothing. An empty text is a new folder under outputs/.

    Raises UserError, naming `dump_folder` and what is in the folder.
    """
    expected, remedy = "a path, no URL", "Pass a folder that every node can write to."
    expect("://" not in folder, "dump_folder", folder, expected, remedy)
    if not folder or not os.path.lexists(folder):
        return
    with explained(Path(folder)):
        entries = sorted(os.listdir(folder))
    others = [name for name in entries if name not in _MADE_BEFORE and not name.endswith(".log")]
    expected = f"a folder that is new, empty or a run's own, but it has {', '.join(others[:4])}"
    remedy = "A run would overwrite files there: pass a new folder, or leave it out for one under outputs/."
    expect(not others or LOCK in entries, "dump_folder", folder, expected, remedy)


def check_writable(folder: Path) -> None:
    """Raise UserError if nothing can be written to the folder, or to the folder in which it would be made."""
    existing = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    with explained(folder), tempfile.TemporaryDirectory(dir=existing):
        pass


def new_folder(name: str) -> Path:
    """Make a folder under outputs/, named after the config and the time, which no other run has."""
    first = Path(f"outputs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    folder, number = first, 1
    with explained(folder):
        folder.parent.mkdir(exist_ok=True)
        while True:
            try:
                folder.mkdir()
                return folder
            except FileExistsError:  # of a run that began in the same second
                number += 1
                folder = first.with_name(f"{first.name}-{number}")


def lock(folder: Path) -> IO[str]:
    """Make a run's folder, if it is missing, and lock it until `unlock`, or until this process and those that it has forked have ended.

    Raises UserError if a run may not write there (see `check_dump_folder`), or another run is using it.
    """
    check_dump_folder(str(folder))
    with explained(folder):
        for part in _PARTS:
            (folder / part).mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK, "a")  # noqa: SIM115  (held until the process ends)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"dump_folder: another run is using {folder}. Wait for it to end, or pass another --dump-folder."
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            progress(
                f"{folder}: its file system has no locks, so a second run there would end this one"
            )
    return file


def unlock(file: IO[str]) -> None:
    """Let another run use the folder, also while processes that were forked from this one still end: they have the lock too."""
    with suppress(OSError):  # one of NO_LOCKS
        fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Replace an OSError by a UserError that names `dump_folder`."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"dump_folder: cannot write to {folder}: {error.strerror}. Pass --dump-folder with a folder you may write to."
        ) from error
