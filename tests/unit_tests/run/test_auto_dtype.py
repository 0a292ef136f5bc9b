"""dtype "auto": what this machine multiplies faster."""

import pytest
import torch

from torchtitan_rl.configs.debug import debug
from torchtitan_rl.run import auto_dtype


@pytest.mark.parametrize(
    ("on_cpu", "capability", "isa", "expected"),
    [
        (True, "avx512_bf16", "", "bfloat16"),
        (True, "amx_bf16", "DEFAULT", "bfloat16"),
        (True, "avx512_bf16", "AVX2", "float32"),
        (True, "avx2", "", "float32"),
        (False, "avx2", "", "bfloat16"),
    ],
)
def test_auto_follows_the_machine(monkeypatch, on_cpu, capability, isa, expected):
    config = debug()
    config.generator.dtype = config.trainer.mixed_precision_param = "auto"
    monkeypatch.setattr(auto_dtype, "FOR_CPU", on_cpu)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {capability: True})
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)
    assert auto_dtype.set_dtypes(config).startswith(f"dtype auto: {expected}")
    assert (config.generator.dtype, config.trainer.mixed_precision_param) == (expected, expected)
    assert auto_dtype.set_dtypes(config) == ""
    config.trainer.mixed_precision_param = "bfloat16"
    warning = "warning: trainer.mixed_precision_param bfloat16 on a CPU without"
    assert auto_dtype.set_dtypes(config).startswith(warning) == (expected == "float32")
