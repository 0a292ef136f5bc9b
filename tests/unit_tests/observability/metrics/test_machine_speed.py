"""The machine's peak speed, and the warning of a CPU that is slow in bfloat16."""

import time

import pytest
import torch

from torchtitan_rl.observability.machine import bfloat16_warning, measured_speeds


def test_machine_speed_is_measured_once_within_two_seconds():
    begin = time.process_time()
    speeds = measured_speeds("bfloat16", "float32")
    assert min(speeds.memory_bytes_per_s, *speeds.flops_per_s.values()) > 1e8
    assert measured_speeds("bfloat16", "float32") is speeds
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(("slowdown", "said"), [(80, "80 times as long"), (4, "4 times as long"), (1, "")])
def test_cpu_slow_in_bfloat16_is_warned_of_with_float32_flags(monkeypatch, slowdown, said):
    speeds = {torch.float32: 1e11, torch.bfloat16: 1e11 / slowdown}
    monkeypatch.setattr("torchtitan_rl.observability.machine.product_flops_per_s", speeds.get)
    warning = bfloat16_warning({"generator.dtype": "bfloat16", "trainer.mixed_precision_param": "float32"})
    assert said in warning
    assert warning.endswith("Pass --generator.dtype float32" if said else "")
    assert bfloat16_warning({"generator.dtype": "float32"}) == ""
