import time
from types import SimpleNamespace

import pytest
from vllm.v1.metrics.stats import IterationStats, PrefillStats, SchedulerStats

from torchtitan_rl.observability import engine_stats
from torchtitan_rl.observability.engine_stats import EngineStats


def step(prompt: int = 0, cached: int = 0) -> IterationStats:
    """What vLLM says of one step that began to read a prompt of which some were cached."""
    stats, prefill = IterationStats(), PrefillStats()
    prefill.set(num_prompt_tokens=prompt, num_local_cached_tokens=cached, num_external_cached_tokens=0)
    stats.prompt_token_stats.update_from_output(prefill)
    return stats


def test_engine_time_is_split_between_prefill_and_decoding(monkeypatch):
    clock = iter([0.0, 8.0, 10.0, 20.0, 21.0])
    monkeypatch.setattr(engine_stats, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    stats = EngineStats()
    for running, said in ((0, step(prompt=9)), (5, step()), (5, step(prompt=25, cached=20)), (5, None)):
        stats.record(SchedulerStats(num_running_reqs=running), said)
    monkeypatch.setattr(engine_stats, "time", time)
    assert stats.metrics([])["generator/prompts_s"].value == pytest.approx(8.0 + 0.0 + 5.0)
