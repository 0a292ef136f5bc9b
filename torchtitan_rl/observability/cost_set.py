"""The metrics that say what a step cost: optimizer, time, perf. docs/metrics.md has every formula.

Pure functions of numbers that the caller has at hand; what is None is left out.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from torchtitan_rl.types import Metric


def optimizer_metrics(
    *,
    grad_norm: float | Tensor,
    learning_rate: float,
    optimizer_step: int,
    epoch: float | None = None,
    prompts_seen: int | None = None,
    tokens_seen: int | None = None,
) -> dict[str, Metric]:
    """Where the optimizer stands. `grad_norm` is of one update, before clipping; counts are since the run began."""
    counters = {
        "optimizer/learning_rate": learning_rate,
        "optimizer/step": optimizer_step,
        "optimizer/epoch": epoch,
        "optimizer/prompts_seen": prompts_seen,
        "optimizer/tokens_seen": tokens_seen,
    }
    last = {key: Metric(float(value), "last") for key, value in counters.items() if value is not None}
    return {"optimizer/grad_norm": Metric(grad_norm), **last}


def time_metrics(
    phases: Mapping[str, float], *, step_seconds: float, sync_bytes: float | None = None
) -> dict[str, Metric]:
    """Seconds of each phase of a step on this rank, the slowest rank's being kept, and what no phase holds.

    Where `timed(name)` and `timed("step")` measure the phases, the recorder adds time/unaccounted by itself and this is
    needed for `sync_bytes` alone. A part of a phase is named "update/forward": it is not counted again.
    """
    metrics = {f"time/{name}": Metric(seconds, "max") for name, seconds in phases.items()}
    metrics["time/step"] = Metric(step_seconds, "max")
    whole = sum(seconds for name, seconds in phases.items() if "/" not in name)
    metrics["time/unaccounted"] = Metric(step_seconds - whole, "max")
    if sync_bytes is not None:
        metrics["sync/bytes"] = Metric(sync_bytes, "max")
    return metrics


def perf_metrics(
    *,
    generated_tokens: int,
    trained_tokens: int,
    generate_seconds: float,
    update_seconds: float,
    step_seconds: float,
    flops_per_token: float | None = None,
    peak_flops: float | None = None,
    decode_bound_tokens_per_s: float | None = None,
    padding_tokens: int | None = None,
    rank_tokens: Sequence[int] | None = None,
    peak_memory_bytes: int | None = None,
) -> dict[str, Metric]:
    """Throughput and waste of one step over all ranks; every rank may record it, the values being alike.

    Args:
        generated_tokens: completion tokens sampled in the step.
        trained_tokens: prompt and completion tokens that went through forward and backward, without padding.
        flops_per_token: of forward and backward.
        peak_flops: of all devices together, a second; MFU is left out without it.
        decode_bound_tokens_per_s: the tokens/s that memory bandwidth allows in decoding.
        padding_tokens: places of the packed batches that held no token.
        rank_tokens: tokens of each data-parallel rank.
        peak_memory_bytes: of this rank's device; the largest over ranks is kept.
    """
    generated_per_s = _rate(generated_tokens, generate_seconds)
    trained_per_s = _rate(trained_tokens, update_seconds)
    values = {
        "perf/generated_tokens_per_s": generated_per_s,
        "perf/trained_tokens_per_s": trained_per_s,
        "perf/step_tokens_per_s": _rate(generated_tokens, step_seconds),
    }
    if flops_per_token and peak_flops and trained_per_s is not None:
        values["perf/mfu"] = trained_per_s * flops_per_token / peak_flops
    if decode_bound_tokens_per_s and generated_per_s is not None:
        values["perf/decode_bound_fraction"] = generated_per_s / decode_bound_tokens_per_s
    if padding_tokens is not None and padding_tokens + trained_tokens:
        values["perf/padding_fraction"] = padding_tokens / (padding_tokens + trained_tokens)
    if rank_tokens and sum(rank_tokens):
        values["perf/rank_imbalance"] = max(rank_tokens) * len(rank_tokens) / sum(rank_tokens) - 1.0
    metrics = {key: Metric(value) for key, value in values.items() if value is not None}
    if peak_memory_bytes is not None:
        metrics["perf/peak_memory_gib"] = Metric(peak_memory_bytes / 2**30, "max")
    return metrics


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None
