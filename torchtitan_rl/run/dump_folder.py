"""Which folders a run may write to: a new one, an empty one, or a run's own; and their locks. It imports no torch."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from torchtitan_rl.errors import UserError, expect
from torchtitan_rl.run.run_end import LOCK

RUN_ID = "run_id"
"""A file of every run's folder, as LOCK; one without metrics has none."""

CHECKOUT = Path(__file__).resolve().parents[2]

PARTS = ("", "logs", "checkpoint")
"""Folders that every run's folder has."""

_MADE_BEFORE = {"checkpoint", "logs", "lost+found", LOCK}
"""Names that a folder may have before its run: a link to another disk, what an ended start has left, a new disk's own."""

NAMED = 4
"""The message names so many entries of a folder that is refused."""


def check_dump_folder(folder: str) -> None:
    """Check that a run may write to `folder`, or may make it. Writes nothing. An empty text is a new folder under outputs/.

    Raises:
        UserError: naming `dump_folder` and what the folder is.
    """
    if not folder:
        return
    path = Path(folder)
    expect(
        "://" not in folder,
        "dump_folder",
        folder,
        "a path, no URL",
        "Pass a folder that every node can write to.",
    )
    with explained(path):
        whose = _other_use(path)
        expect(
            not whose, "dump_folder", folder, f"a folder that is new, empty or a run's own, but {whose}",
            "A run would overwrite files there: pass a new folder, or leave it out for one under outputs/.",
        )  # fmt: skip
        for needed in PARTS:
            part = (path / needed).absolute()
            existing = next(parent for parent in (part, *part.parents) if os.path.lexists(parent))
            if not existing.is_dir():
                raise NotADirectoryError(0, f"Not a directory: {existing}")
            if not os.access(existing, os.W_OK | os.X_OK):
                raise PermissionError(0, "Permission denied")


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Replace an OSError by a UserError that names `dump_folder`."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"dump_folder: cannot write to {folder}: {error.strerror}. Pass --dump-folder with a folder you may write to."
        ) from error


def _other_use(folder: Path) -> str:
    """The other use that a folder has; "" if it is new, empty or a run's own. Raises OSError if it cannot be read."""
    if not os.path.lexists(folder):
        return ""
    found = sorted(os.listdir(folder))
    if {LOCK, RUN_ID} & set(found) or all(
        name in _MADE_BEFORE or name.endswith(".log") for name in found
    ):
        return ""
    what = (
        "it is a model's folder, with"
        if any(name.endswith(".safetensors") for name in found)
        else "it has"
    )
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return f"{what} {', '.join(found[:NAMED])}{more}"


def lock_existing(folder: Path) -> IO[str] | None:
    """Lock a run's folder; None if it has no lock yet. Writes nothing.

    Raises:
        UserError: if a run may not write there (see `check_dump_folder`), or another run is using it.
    """
    check_dump_folder(str(folder))
    return _locked(folder) if (folder / LOCK).exists() else None


class FolderInUseError(UserError):
    """A living run holds the folder's lock."""


def create(folder: Path) -> IO[str]:
    """Create a run's folder and lock it."""
    check_dump_folder(str(folder))
    with explained(folder):
        for needed in PARTS:
            (folder / needed).mkdir(parents=True, exist_ok=True)
    return _locked(folder)


def check_can_be_made(folder: Path) -> None:
    """Raise UserError if the folder cannot be made. Makes and removes the first folder of it that is missing."""
    for missing in [each for each in (folder, *folder.parents) if not os.path.lexists(each)][-1:]:
        with explained(folder):
            missing.mkdir()
            missing.rmdir()


def _locked(folder: Path) -> IO[str]:
    with explained(folder):
        lock = open(folder / LOCK, "a")  # noqa: SIM115  (held until the process ends)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise FolderInUseError(
            f"dump_folder: another run is using {folder}. Wait for it to end, or pass another --dump-folder."
        ) from error
    except OSError as error:
        raise UserError(
            f"dump_folder: the file system of {folder} has no locks ({error.strerror}). Pass a --dump-folder on another one."
        ) from error
    return lock
