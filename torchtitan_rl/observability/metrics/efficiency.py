"""Compares a step with its machine's peak: the least time that its work requires over the time that it took."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from torchtitan_rl.core.types import Episode, Group, Metric
from torchtitan_rl.observability.machine import Speeds

if TYPE_CHECKING:
    from torchtitan_rl.core.trainer.optimizer import UpdateReport


class Footprint(NamedTuple):
    """The bytes that generation has to move, and the number of ranks that share the work."""

    weights: int
    """Bytes of the model in the generator's dtype. An engine reads them for each token of its longest completion."""
    kv_per_token: int
    """Bytes of one token's keys and values in all layers. They are read for each later token of the sequence."""
    ranks: int
    """All ranks of the run."""
    engine_ranks: int
    """Ranks that share one engine."""
    train_dtype: str
    engine_dtype: str


def bound_seconds(
    lengths: list[tuple[int, int]], *, flops: float, flops_per_token: float, speeds: Speeds, footprint: Footprint
) -> dict[str, float]:
    """The least seconds that a step's "decode", "train" and "sync" can take on ranks with these speeds.

    decode: the longer of two times. One reads the weights once for each token of the longest completion, and each
    sequence's KV cache for each of its tokens. The other is the matrix products at the peak, the longer one on a CPU.
    train: the update's products at the matrix peak. sync: reading and writing the weights once.

    Args:
        lengths: (prompt tokens, completion tokens) of every sequence of the step.
        flops: floating-point operations of the whole update.
        flops_per_token: floating-point operations of one token's forward and backward.
    """
    reads = sum(n * prompt + n * (n - 1) // 2 for prompt, n in lengths)  # cached tokens read in all decoding steps
    longest = max((n for _, n in lengths), default=0)
    weights = footprint.weights / footprint.engine_ranks
    reading = (weights * longest + footprint.kv_per_token * reads / footprint.ranks) / speeds.memory_bytes_per_s
    products = sum(n for _, n in lengths) * flops_per_token / 3 / footprint.ranks
    return {
        "decode": max(reading, products / speeds.flops_per_s(footprint.engine_dtype)),
        "train": flops / footprint.ranks / speeds.flops_per_s(footprint.train_dtype),
        "sync": 2 * weights / speeds.memory_bytes_per_s,
    }


def efficiency_metrics(
    groups: list[Group[Episode]],
    update: "UpdateReport",
    *,
    seconds: Mapping[str, float],
    speeds: Speeds,
    footprint: Footprint,
) -> dict[str, Metric]:
    """`efficiency/{decode,train,sync}`: the least seconds over the measured seconds of the slowest rank; at best 1.

    Args:
        seconds: seconds in "generate", "train" and "sync" on this rank. A phase with 0 seconds is absent.
    """
    lengths = [(len(g.prompt.token_ids), len(e.completion.token_ids)) for g in groups for e in g.samples]
    per_token = update.flops_per_token
    flops = (update.trained_tokens - 2 / 3 * update.silent_tokens) * per_token  # a forward is a third
    bounds = bound_seconds(lengths, flops=flops, flops_per_token=per_token, speeds=speeds, footprint=footprint)
    took = {"decode": seconds["generate"], "train": seconds["train"], "sync": seconds["sync"]}
    return {f"efficiency/{k}": Metric(bound / took[k], "min") for k, bound in bounds.items() if took[k] > 0}


def lost_metrics(update: "UpdateReport", *, seconds: Mapping[str, float]) -> dict[str, Metric]:
    """`lost/..._s`: seconds of a step lost to padding, uneven ranks and waiting. The engine records its own losses.

    Args:
        seconds: seconds in "train" and "gather" on this rank. "gather" is mostly waiting for other ranks.
    """
    padding = update.padding_tokens / update.packed_tokens if update.packed_tokens else 0.0
    most = max(update.rank_tokens, default=0)
    idle = 1 - sum(update.rank_tokens) / len(update.rank_tokens) / most if most else 0.0
    lost = {"padding": padding * seconds["train"], "imbalance": idle * seconds["train"], "waiting": seconds["gather"]}
    return {f"lost/{name}_s": Metric(value, "max") for name, value in lost.items()}
