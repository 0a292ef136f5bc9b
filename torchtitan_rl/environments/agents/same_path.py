"""One path for the folders of all agents: each command finds its own folder there, by a mount namespace."""

import functools
import logging
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torchtitan_rl.events import WATCH_VARIABLE

logger = logging.getLogger(__name__)

WORK, HOME, TEMPORARY = "work", "home", "tmp"
"""An agent's folders: the one it works in, its HOME and its TMPDIR."""

_MOUNT = (
    'mount --bind "$0" "$1" && cd "$1/work" && shift && '
    'exec setpriv --ambient-caps=-all --inh-caps=-all -- "$@"'
)
"""Shell script of a namespace's first process, for the folder, the path and the command."""

WAYS = {
    "as root": ["unshare", "--mount", "sh", "-c", _MOUNT],
    "in a user namespace": [
        *("unshare", "--user", "--map-current-user", "--keep-caps", "--mount", "sh", "-c", _MOUNT)
    ],
    "by bubblewrap": ["bwrap", "--dev-bind", "/", "/", "--bind"],
}
"""{name in the log: the beginning of a command}. The folder, the path and the agent's command follow."""


def new_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="agent-", dir=os.environ.get(WATCH_VARIABLE)))
    for name in (WORK, HOME, TEMPORARY):
        (folder / name).mkdir()
    return folder


def placed(command: Sequence[str], folder: Path) -> tuple[list[str], Path]:
    """Returns the command so that it runs in its folder, and the path at which it sees that: the same one for all agents of
    this user, or the folder itself where the machine has no namespaces."""
    at = Path(tempfile.gettempdir()) / f"agent-{os.getuid()}"
    at.mkdir(mode=0o700, exist_ok=True)  # it stays, empty
    way = _way(at)
    return ([*command], folder) if way is None else (_mounted(way, folder, at, command), at)


@functools.cache
def _way(at: Path) -> str | None:
    """Returns the first way that works on this machine. The log says which."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, WORK).mkdir()
        for way in WAYS:
            try:
                subprocess.run(_mounted(way, folder, at, ["true"]), check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError):
                continue
            logger.info(f"every agent sees its folder at {at}, mounted {way}")
            return way
    logger.info("every agent has another path: no mount namespace can be made here")
    return None


def _mounted(way: str, folder: str | Path, at: Path, command: Sequence[str]) -> list[str]:
    chdir = ["--chdir", str(at / WORK), "--"] if way == "by bubblewrap" else []
    return [*WAYS[way], str(folder), str(at), *chdir, *command]
