"""dtype "auto": what this machine multiplies faster."""

import pytest
import torch

from configs.debug import debug
from torchtitan_rl.setup import auto_dtype


@pytest.mark.parametrize(
    ("on_cpu", "gain", "expected"), [(True, 2.3, "bfloat16"), (True, 0.3, "float32"), (False, 0, "bfloat16")]
)
def test_auto_follows_the_machine(monkeypatch, on_cpu, gain, expected):
    config = debug()
    config.generator.dtype = config.trainer.mixed_precision_param = "auto"
    monkeypatch.setattr(auto_dtype, "ON_CPU", on_cpu)
    monkeypatch.setattr(auto_dtype, "seconds_of_products", lambda dtype: gain if dtype == torch.float32 else 1.0)
    said = auto_dtype.choose_dtypes(config)
    assert set(config.dtypes.values()) == {expected}
    assert said.startswith(f"dtype auto: {expected}")


def test_a_dtype_that_is_set_stays():
    config = debug()
    config.trainer.mixed_precision_param = "auto"
    auto_dtype.choose_dtypes(config)
    assert config.generator.dtype == "float32"
    assert auto_dtype.choose_dtypes(config) == ""
