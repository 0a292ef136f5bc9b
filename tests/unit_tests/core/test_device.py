"""Every branch that only a GPU takes, on a simulated `torch.cuda` surface."""

import pytest
import torch

from torchtitan_rl.core import device
from torchtitan_rl.core.generator import generator as generator_module
from torchtitan_rl.core.generator.generator import Generator, engine_options


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
OF_A_CPU = {"enforce_eager": True, "enable_sleep_mode": False, "enable_chunked_prefill": False}
OF_A_GPU = {"enforce_eager": False, "enable_sleep_mode": True, "gpu_memory_utilization": 0.4}
NO_CUSTOM = {"disable_custom_all_reduce": True}


@pytest.fixture
def without_hooks(monkeypatch):
    monkeypatch.setattr(device, "hooks", device.DeviceHooks())


@pytest.mark.parametrize(
    ("on_cpu", "growing", "dtype", "degree", "expected"),
    [
        (True, False, "float32", 1, OF_A_CPU),
        (True, True, "bfloat16", 2, OF_A_CPU | FLOAT32_HEAD),
        (False, False, "float32", 1, OF_A_GPU | TRITON),
        (False, False, "bfloat16", 1, OF_A_GPU | FLOAT32_HEAD),
        (False, True, "bfloat16", 1, OF_A_GPU | FLOAT32_HEAD),
        (False, False, "bfloat16", 2, OF_A_GPU | FLOAT32_HEAD),
        (False, True, "bfloat16", 2, OF_A_GPU | FLOAT32_HEAD | NO_CUSTOM),
        (False, True, "float32", 2, OF_A_GPU | TRITON | NO_CUSTOM),
    ],
)
def test_what_the_engine_is_told(monkeypatch, without_hooks, on_cpu, growing, dtype, degree, expected):
    monkeypatch.setattr(generator_module, "ON_CPU", on_cpu)
    monkeypatch.setattr(generator_module, "expandable_segments", lambda: growing)
    assert engine_options(Generator.Config(dtype=dtype, tensor_parallel_degree=degree)) == expected


def test_a_device_s_options_win_over_the_core_s(monkeypatch, without_hooks):
    device.install_hooks(device.DeviceHooks(engine_options=lambda: {"hf_overrides": {"head_dtype": "auto"}}))
    assert engine_options(Generator.Config(dtype="bfloat16"))["hf_overrides"] == {"head_dtype": "auto"}


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


@pytest.mark.skipif(not device.ON_CPU, reason="a GPU's machine has compilers")
def test_a_cpu_needs_no_compiler():
    import torch._dynamo

    assert torch._dynamo.config.disable
