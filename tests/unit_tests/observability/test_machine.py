"""Peak memory, by samples at the end of timed parts."""

import torch

from torchtitan_rl.observability import machine

GIB = 2**30


def test_peak_memory_covers_the_whole_gpu_and_resets_when_read(monkeypatch):
    monkeypatch.setattr(machine, "ON_CPU", False)
    free = iter([70, 30, 50, 60, 65])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free) * GIB, 80 * GIB))
    machine.highest_sample = 0
    assert machine.sample_memory() == 10 * GIB
    assert machine.sample_memory() == 50 * GIB
    assert machine.peak_memory_bytes() == 50 * GIB
    assert machine.peak_memory_bytes() == 20 * GIB
