"""Models by their name on the Hugging Face hub: downloaded once on each node, from the cache afterwards.

python -m torchtitan_rl.setup.hub Qwen/Qwen3-0.6B        downloads one beforehand, and prints its folder
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from torchtitan_rl.core.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
"""Of a model's repository: weights, configs, tokenizers, chat templates."""


def is_hub_name(text: str) -> bool:
    """Whether it names no folder here and could name a model there. Example: is_hub_name("Qwen/Qwen3-0.6B")"""
    return _NAME.fullmatch(text) is not None and not Path(text).exists()


def folder_of(name: str) -> Path:
    """The folder of a hub's model in this node's cache; the node's first rank downloads it where it is missing, others wait.

    Raises:
        UserError: naming `hf_assets_path`, where the hub has no such model, does not give it or cannot be reached.
    """
    while (folder := cached(name)) is None:
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            return _download(name)
        time.sleep(0.5)  # torchrun ends this rank too, should that one fail
    return folder


def cached(name: str) -> Path | None:
    """Its folder, where all of it has been downloaded; asks nobody."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    index = folder / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    whole = all((folder / file).exists() for file in (*files, "config.json"))
    return folder if whole and any(folder.glob("tokenizer*")) else None


def _download(name: str) -> Path:
    """In a process of its own: this one has told its libraries that there is no network."""
    from torchtitan_rl import HUB_OFFLINE

    environment = {**os.environ, "HF_HUB_OFFLINE": HUB_OFFLINE}
    command = [sys.executable, "-m", "torchtitan_rl.setup.hub", name]
    print(f"download {name} from {os.environ.get('HF_ENDPOINT', 'https://huggingface.co')}", flush=True)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)  # its progress goes to stderr
    if done.returncode:
        raise UserError(f"hf_assets_path = {name!r}: {done.stdout.strip() or 'the download failed'}")
    return Path(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Download the model that the command line names and print its folder, or what is wrong and exit with 2."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    name = sys.argv[1]
    elsewhere = "or download it elsewhere and pass --hf-assets-path FOLDER"
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        sys.exit(_say(f"it is not in the cache, and HF_HUB_OFFLINE is set. Unset it, {elsewhere}."))
    try:
        print(snapshot_download(name, allow_patterns=_FILES))
    except GatedRepoError:
        sys.exit(
            _say(f"the model is gated. Accept its terms on its page, set HF_TOKEN to a token of yours, {elsewhere}.")
        )
    except RepositoryNotFoundError:
        sys.exit(_say("there is no such folder here, and no such model on the hub (a private one needs HF_TOKEN)."))
    except Exception as error:  # of the network, of the disk: many kinds
        sys.exit(_say(f"the hub did not give it ({type(error).__name__}: {error}). Try again, {elsewhere}."))


def _say(message: str) -> int:
    print(" ".join(message.split()))
    return 2


if __name__ == "__main__":
    main()
