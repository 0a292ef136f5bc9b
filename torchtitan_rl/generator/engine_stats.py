"""What the engine says of its own work: cache hits, preemptions, the longest request."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchtitan_rl.types import Metric

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

_QUERIES, _HITS, _PREEMPTIONS = "vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:num_preemptions"


class EngineStats:
    """Differences of vLLM's counters between two calls; the engine must have been built with disable_log_stats=False."""

    def __init__(self, llm: "LLM") -> None:
        self._llm = llm
        self._before = self._counters()

    def since_last(self, outputs: Sequence["RequestOutput"]) -> dict[str, Metric]:
        """`generator/...` of this replica since the last call.

        Args:
            outputs: the requests that ended in between, one for each turn of a completion.
        """
        now = self._counters()
        queries, hits, preemptions = (now[name] - self._before[name] for name in (_QUERIES, _HITS, _PREEMPTIONS))
        self._before = now
        times = [output.metrics for output in outputs]
        longest_s = max((time.last_token_ts - time.queued_ts for time in times), default=0.0)
        metrics = {
            "generator/preemptions": Metric(preemptions, "sum"),
            "generator/longest_request_s": Metric(longest_s, "max"),
        }
        if queries:
            metrics["generator/prefix_cache_hit_rate"] = Metric(hits / queries, weight=queries)
        return metrics

    def _counters(self) -> dict[str, float]:
        wanted = (_QUERIES, _HITS, _PREEMPTIONS)
        found = {metric.name: metric.value for metric in self._llm.llm_engine.get_metrics() if metric.name in wanted}
        return {name: found.get(name, 0) for name in wanted}
