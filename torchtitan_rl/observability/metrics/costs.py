"""Optimizer and throughput metrics of a step. Values that are None or unknown on this machine are absent."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchtitan_rl.common.summary import same_everywhere
from torchtitan_rl.core.types import Metric

if TYPE_CHECKING:
    from torchtitan_rl.core.state import RunState
    from torchtitan_rl.core.trainer.trainer import UpdateReport
    from torchtitan_rl.observability.metrics.efficiency import TokenFlops


def optimizer_metrics(update: "UpdateReport", state: "RunState") -> dict[str, Metric]:
    """`optimizer/...`: the optimizer's values in this step, and counts since the start of the run."""
    values = {
        "grad_norm": update.grad_norm,
        "clipped_fraction": update.clipped_fraction,
        "update_ratio": update.update_ratio,
        "learning_rate": update.learning_rate,
        "step": state.optimizer_steps,
        "prompts_seen": state.prompts_seen,
        "tokens_seen": state.tokens_seen,
    }
    return {f"optimizer/{key}": same_everywhere(float(value)) for key, value in values.items() if value is not None}


def perf_metrics(
    update: "UpdateReport",
    *,
    generated_tokens: int,
    seconds: Mapping[str, float],
    token_flops: "TokenFlops",
    peak_flops: float | None = None,
    peak_memory_bytes: int = 0,
) -> dict[str, Metric]:
    """`perf/...`: throughput and waste of one step.

    Token counts are totals over all ranks; seconds are this rank's. The minimum rate over ranks is therefore that of
    the slowest rank, which the step waits for.

    Args:
        generated_tokens: tokens sampled in the step's training rollouts.
        seconds: seconds in "generate", "train" and "step" on this rank.
        token_flops: floating-point operations of one token's forward and backward.
        peak_flops: peak FLOP/s of all devices together; without it, MFU is absent.
        peak_memory_bytes: memory in use at the end of the fullest phase (`peak_memory_bytes` of machine.py).
    """
    rates = {
        "perf/generated_tokens_per_s": _rate(generated_tokens, seconds["generate"]),
        "perf/trained_tokens_per_s": _rate(update.trained_tokens, seconds["train"]),
        "perf/step_tokens_per_s": _rate(generated_tokens, seconds["step"]),
    }
    if peak_flops:
        rates["perf/mfu"] = _rate(token_flops.total(update.work) / peak_flops, seconds["train"])
    metrics = {key: Metric(rate, "min") for key, rate in rates.items() if rate is not None}
    if total := sum(update.rank_tokens):
        metrics["perf/rank_imbalance"] = same_everywhere(
            max(update.rank_tokens) * len(update.rank_tokens) / total - 1.0
        )
        metrics["perf/forward_only_fraction"] = same_everywhere(update.forward_only_tokens / update.trained_tokens)
    if update.packed_tokens:
        share = update.padding_tokens / update.packed_tokens
        metrics["perf/padding_fraction"] = Metric(share, weight=update.packed_tokens)
    return metrics | {"perf/peak_memory_gib": Metric(peak_memory_bytes / 2**30, "max")}


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None
