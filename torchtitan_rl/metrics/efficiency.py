"""A step held against what its machine could do: the work that cannot be avoided over the seconds that it took."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from torchtitan_rl.models import hf_architecture
from torchtitan_rl.run.machine import Speeds
from torchtitan_rl.trainer.policy import meta_model
from torchtitan_rl.types import Episode, Group, Metric

if TYPE_CHECKING:
    from torchtitan_rl.controller import Controller
    from torchtitan_rl.trainer.optimizer import UpdateReport

WIDTH = {"float32": 4, "bfloat16": 2}


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

    @classmethod
    def of(cls, config: "Controller.Config", *, world_size: int) -> "Footprint":
        """The footprint of a run."""
        shape, width = hf_architecture(config.model_spec.model), WIDTH[config.generator.dtype]
        cached = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
        parameters = sum(p.numel() for p in meta_model(config.model_spec).parameters())
        engine_ranks = config.generator.tensor_parallel_degree
        dtype = config.trainer.mixed_precision_param
        return cls(width * parameters, width * cached, world_size, engine_ranks, dtype)


def efficiency_metrics(
    groups: list[Group[Episode]],
    update: "UpdateReport",
    *,
    seconds: Mapping[str, float],
    speeds: Speeds,
    footprint: Footprint,
) -> dict[str, Metric]:
    """Shares of the bound, 1 at best, of the slowest rank; what took no time is left out.

    `efficiency/decode`: reading the weights once for each token of the longest completion, and each sequence's cache for each
    of its tokens, at the measured memory rate, over the seconds of generation. `efficiency/train`: the update's products at
    the measured matrix peak, over its seconds. `efficiency/sync`: reading and writing the weights once, over the sync's.

    Args:
        seconds: of "generate", "train" and "sync" on this rank.
    """
    lengths = [(len(g.prompt.token_ids), len(e.completion.token_ids)) for g in groups for e in g.samples]
    reads = sum(n * prompt + n * (n - 1) // 2 for prompt, n in lengths)  # cached tokens, over all decoding steps
    longest = max((n for _, n in lengths), default=0)
    decoded = footprint.weights * longest / footprint.engine_ranks + footprint.kv_per_token * reads / footprint.ranks
    work = (update.trained_tokens - 2 / 3 * update.silent_tokens) * update.flops_per_token  # a forward is a third
    bounds = {
        "decode": (decoded / speeds.memory_bytes_per_s, seconds["generate"]),
        "train": (work / footprint.ranks / speeds.flops_per_s(footprint.train_dtype), seconds["train"]),
        "sync": (2 * footprint.weights / footprint.engine_ranks / speeds.memory_bytes_per_s, seconds["sync"]),
    }
    return {f"efficiency/{name}": Metric(bound / took, "min") for name, (bound, took) in bounds.items() if took > 0}
