"""Manifests: a list of a folder's files with their sizes and digests, written last and checked before the files are read.

A checkpoint is written under a temporary name, its manifest last, and renamed when all of it is on the disk. So a folder without
a manifest was never finished, and a folder whose files differ from its manifest was damaged later.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torchtitan_rl.errors import UserError

NAME = "manifest.json"
HASH_THREADS = 4
"""Files hashed at once in a process. hashlib releases Python's lock."""
_FILE_NAME = re.compile(r"[\w.-]*\w", re.ASCII)


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex. Takes 0.6 s per GB on a core with SHA instructions, about 2 s without."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Sizes in bytes and digests by file name. Example: {"__0_0.distcp": {"bytes": 29193728, "sha256": "5f0c..."}}"""
    files = list(files)
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        digests = pool.map(digest, files)
        return {
            file.name: {"bytes": file.stat().st_size, "sha256": sha256}
            for file, sha256 in zip(files, digests, strict=True)
        }


def write(folder: Path, files: dict[str, dict[str, Any]], **about: Any) -> None:
    """Write the manifest of `folder`, including `about`, and wait until it and the folder's entries are on the disk."""
    content = {**about, "files": files}
    text = json.dumps({**content, "sha256": _own_digest(content)}, indent=1)
    with open(folder / NAME, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def read(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`: "files", the run's "config" by dotted field, and what else `write` was given.

    Raises UserError, naming the reason, if it is missing or damaged.
    """
    path = folder / NAME
    if not path.is_file():
        raise UserError(f"it has no {NAME}: it was not finished, or not written by this version")
    try:
        manifest = json.loads(path.read_text())
        is_whole = manifest.pop("sha256") == _own_digest(manifest)
        files, config = manifest["files"], manifest["config"]
        # Names without a path, so that no file outside the folder is read.
        are_names = all(_FILE_NAME.fullmatch(n) and isinstance(e, dict) for n, e in files.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise UserError(f"its {NAME} is damaged ({error!r})") from error
    if not (is_whole and are_names and isinstance(config, dict)):
        raise UserError(f"its {NAME} is damaged: it is not what a run writes")
    return manifest


def examine(folder: Path) -> str:
    """Compare a folder's files with its manifest. Returns the first difference, "" if there is none. Reads all files.

    Sizes are compared first, because digests take longer.

    Example: "__0_0.distcp has 704 bytes in place of 29193728"
    """
    try:
        manifest = read(folder)
        name, step = re.search(r"step-(\d+)", folder.name), manifest.get("step")
        if name and step not in (None, int(name[1])):
            return f"it is the checkpoint of step {step}: name it step-{step}"
        files = manifest["files"]
        for name, entry in files.items():
            size = (folder / name).stat().st_size
            if not (folder / name).is_file():
                return f"{name} is no file"  # a pipe or a device may never end
            if size != entry.get("bytes"):
                return f"{name} has {size} bytes in place of {entry.get('bytes')}"
        for name, entry in describe(folder / name for name in files).items():
            if entry != files[name]:
                return f"{name} is damaged: its bytes are not those that were written"
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read ({error.strerror})"
    return ""


def sync_folder(folder: Path) -> None:
    """Wait until a folder's entries are on the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _own_digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
