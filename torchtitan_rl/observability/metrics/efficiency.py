"""A step held against what its machine could do: the work that cannot be avoided over the seconds that it took."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from torchtitan_rl.core.types import Episode, Group, Metric
from torchtitan_rl.observability.machine import Speeds

if TYPE_CHECKING:
    from torchtitan_rl.core.trainer.optimizer import UpdateReport


class Footprint(NamedTuple):
    """Bytes that generation cannot avoid to move, and how many ranks share the work."""

    weights: int
    """Of the whole model in the generator's dtype: an engine reads them for every token of its longest completion."""
    kv_per_token: int
    """Keys and values of one token in all layers: read for every later token of its sequence."""
    ranks: int
    engine_ranks: int
    """Ranks that share one engine."""
    train_dtype: str
    engine_dtype: str


def bound_seconds(
    lengths: list[tuple[int, int]], *, flops: float, flops_per_token: float, speeds: Speeds, footprint: Footprint
) -> dict[str, float]:
    """The least time of a step's "decode", "train" and "sync" on ranks of these speeds.

    Decoding reads the weights once for each token of the longest completion, and each sequence's cache for each of its tokens;
    or its products at the matrix peak take longer, as on a CPU, whose peak is low. Training is the update's products at the matrix peak. A sync reads and writes the weights once.

    Args:
        lengths: (prompt tokens, completion tokens) of every sequence of the step.
        flops: of the whole update.
        flops_per_token: of a forward and a backward.
    """
    reads = sum(n * prompt + n * (n - 1) // 2 for prompt, n in lengths)  # cached tokens, over all decoding steps
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
    """`efficiency/{decode,train,sync}`: the bound over the seconds, 1 at best, of the slowest rank.

    Args:
        seconds: of "generate", "train" and "sync" on this rank; what took no time is left out.
    """
    lengths = [(len(g.prompt.token_ids), len(e.completion.token_ids)) for g in groups for e in g.samples]
    per_token = update.flops_per_token
    flops = (update.trained_tokens - 2 / 3 * update.silent_tokens) * per_token  # a forward is a third
    bounds = bound_seconds(lengths, flops=flops, flops_per_token=per_token, speeds=speeds, footprint=footprint)
    took = {"decode": seconds["generate"], "train": seconds["train"], "sync": seconds["sync"]}
    return {f"efficiency/{k}": Metric(bound / took[k], "min") for k, bound in bounds.items() if took[k] > 0}


def lost_metrics(update: "UpdateReport", *, seconds: Mapping[str, float]) -> dict[str, Metric]:
    """`lost/..._s`: seconds of a step that better packing, balance or spreading would save; the engine adds its own.

    Args:
        seconds: of "train" and "gather" on this rank; what it gathers it mostly waits for.
    """
    padding = update.padding_tokens / update.packed_tokens if update.packed_tokens else 0.0
    most = max(update.rank_tokens, default=0)
    idle = 1 - sum(update.rank_tokens) / len(update.rank_tokens) / most if most else 0.0
    lost = {"padding": padding * seconds["train"], "imbalance": idle * seconds["train"], "waiting": seconds["gather"]}
    return {f"lost/{name}_s": Metric(value, "max") for name, value in lost.items()}
