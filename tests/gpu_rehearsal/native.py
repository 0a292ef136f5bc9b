"""Builds and loads the two small libraries that let a CPU build of torch have tensors that say "cuda"."""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = {"accelerator": [], "guard": ["-lc10", "-ltorch_cpu"]}
"""Each library's source below this folder, and what it is linked with."""


def reason_to_skip() -> str | None:
    """Returns why this machine cannot rehearse, None if it can. Does not import torch."""
    if (_torch() / "lib" / "libtorch_cuda.so").exists():
        return "the GPU rehearsal pretends a device for torch's CPU build; this is its CUDA build"
    return None if shutil.which("g++") else "the GPU rehearsal builds two small libraries and needs g++"


def clean_environment() -> dict[str, str]:
    """This process's variables without those of a run, for a rehearsal in a process of its own."""
    of_a_run = "TORCHTITAN", "TORCHELASTIC", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "VLLM", "TORCH_COMPILE"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(of_a_run)}
    return kept | {"OMP_NUM_THREADS": "1"}


def load() -> None:
    """Build the libraries unless a build of the same sources is cached, and load them. Must run before torch is imported."""
    if "torch" in sys.modules:
        raise ImportError("torch was imported before the pretended device's libraries")
    folder = _built()
    ctypes.CDLL(str(folder / "accelerator.so"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(_torch() / "lib" / "libtorch_cpu.so"))
    ctypes.CDLL(str(folder / "guard.so"))


def _torch() -> Path:
    return Path(importlib.util.find_spec("torch").submodule_search_locations[0])


def _built() -> Path:
    """Returns the folder of the libraries, named by the hash of what they are built from."""
    texts = [(HERE / f"{name}.cpp").read_bytes() for name in SOURCES]
    versions = importlib.metadata.version("torch").encode(), Path(__file__).read_bytes()
    digest = hashlib.sha256(b"".join([*texts, *versions])).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchtitan_rl" / "gpu_rehearsal"
    folder = cache / digest
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    torch = _torch()
    include = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    building = tempfile.mkdtemp(dir=cache)
    for name, linked in SOURCES.items():
        out = ["-o", f"{building}/{name}.so", f"-L{torch}/lib", *linked]
        command = ["g++", "-shared", "-fPIC", "-O1", "-std=c++20", *include, str(HERE / f"{name}.cpp"), *out]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        if built.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{built.stderr[-3000:]}")
    if folder.exists():  # another process was faster
        shutil.rmtree(building)
    else:
        os.rename(building, folder)
    return folder
