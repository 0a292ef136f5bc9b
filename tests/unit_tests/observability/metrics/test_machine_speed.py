"""The machine's peak speed."""

import time

from torchtitan_rl.observability.machine import measured_speeds


def test_machine_speed_is_measured_once_within_two_seconds():
    begin = time.process_time()
    speeds = measured_speeds("bfloat16", "float32")
    assert min(speeds.memory_bytes_per_s, *speeds.flops_per_s.values()) > 1e8
    assert measured_speeds("bfloat16", "float32") is speeds
    assert time.process_time() - begin < 2
