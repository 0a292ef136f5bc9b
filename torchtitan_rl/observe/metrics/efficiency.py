"""The least seconds of a step on this machine, for the dry run's estimate."""

from collections.abc import Sequence
from typing import NamedTuple

from torchtitan_rl.observe.machine import Speeds
from torchtitan_rl.observe.metrics.throughput import TokenFlops


class Footprint(NamedTuple):
    """What generation has to move, what a token has to compute, and the number of ranks that share the work."""

    weights: int
    """Bytes of the model in the generator's dtype. An engine reads them for each token of its longest completion."""
    kv_per_token: int
    """Bytes of one token's keys and values in all layers. They are read for each later token of the sequence."""
    pushed: int
    """Bytes that a push sends: all weights, or the adapters alone."""
    ranks: int
    """All ranks of the run."""
    engine_ranks: int
    """Ranks that share one engine."""
    train_dtype: str
    engine_dtype: str
    flops: TokenFlops


def bound_seconds(
    lengths: list[tuple[int, int]],
    *,
    work: Sequence[Sequence[float]],
    speeds: Speeds,
    footprint: Footprint,
) -> dict[str, float]:
    """The least seconds that a step's "decode", "train" and "sync" can take on ranks with these speeds.

    decode: the longer of two times. One reads the weights once for each sampled token of the longest completion, and
    each sequence's KV cache for each of its sampled tokens. The other is the matrix products at the peak, the longer one on a
    CPU.
    train: the update's products at the matrix peak. sync: reading and writing the pushed weights once.

    Args:
        lengths: (prompt tokens, sampled tokens) of every sequence of the step. Tokens of environments are not decoded.
        work: the update's `UpdateReport.work`, [2, 3].
    """
    reads = sum(
        n * prompt + n * (n - 1) // 2 for prompt, n in lengths
    )  # cached tokens read in all decoding steps
    longest = max((n for _, n in lengths), default=0)
    weights = footprint.weights / footprint.engine_ranks
    reading = (
        weights * longest + footprint.kv_per_token * reads / footprint.ranks
    ) / speeds.memory_bytes_per_s
    sampled = sum(n for _, n in lengths)
    products = footprint.flops.forward((sampled, reads, sampled)) / footprint.ranks
    return {
        "decode": max(reading, products / speeds.flops_per_s[footprint.engine_dtype]),
        "train": footprint.flops.total(work)
        / footprint.ranks
        / speeds.flops_per_s[footprint.train_dtype],
        "sync": 2 * footprint.pushed / footprint.engine_ranks / speeds.memory_bytes_per_s,
    }
