"""Optimizer and throughput metrics of a step, and its time beside the least time that its work requires on this machine.

Values that are None or unknown on this machine are absent.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torchtitan_rl.observe.machine import Speeds
from torchtitan_rl.summary import same_everywhere
from torchtitan_rl.types import Episode, Group, Metric

if TYPE_CHECKING:
    from torchtitan.models.common.decoder import Decoder

    from torchtitan_rl.state import RunState
    from torchtitan_rl.trainer.optimizer import UpdateReport


class TokenFlops(NamedTuple):
    """Floating-point operations of one token's forward. Its backward has twice as many, without those for frozen weights."""

    layers: float
    """Two for each weight outside embedding and head."""
    attention: float
    """For each token that it attends to, itself included."""
    head: float
    """Two for each weight of the head, if the token is scored."""
    frozen_layers: float = 0.0
    """The part of `layers` whose weights have no gradient: the backward has these operations once, for the inputs."""
    frozen_head: float = 0.0
    """The same part of `head`."""

    @classmethod
    def of(cls, config: "Decoder.Config", model: "Decoder") -> "TokenFlops":
        """torchtitan's count in three parts. A third of it is the forward."""
        alone, with_one = (config.get_nparams_and_flops(model, length)[1] / 3 for length in (0, 1))
        head = model.lm_head.weight
        apart = {id(head), id(model.tok_embeddings.weight)}
        frozen = sum(
            p.numel() for p in model.parameters() if not p.requires_grad and id(p) not in apart
        )
        head_flops = 2.0 * head.numel()
        return cls(
            layers=alone - head_flops,
            attention=with_one - alone,
            head=head_flops,
            frozen_layers=2.0 * frozen,
            frozen_head=0.0 if head.requires_grad else head_flops,
        )

    def forward(self, work: Sequence[float]) -> float:
        """The operations of the forward over (tokens, attended pairs of tokens, scored tokens)."""
        tokens, attended, scored = work
        return float(self.layers * tokens + self.attention * attended + self.head * scored)

    def total(self, work: Sequence[Sequence[float]]) -> float:
        """The operations of both passes. `work` has one line for the forward and one for the backward, as `UpdateReport.work`."""
        forward, (tokens, _, scored) = work
        saved = self.frozen_layers * tokens + self.frozen_head * scored
        return self.forward(forward) + 2 * self.forward(work[1]) - float(saved)


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
    lengths = [
        (len(g.prompt.token_ids), e.completion.num_sampled) for g in groups for e in g.samples
    ]
    bounds = bound_seconds(lengths, work=update.work, speeds=speeds, footprint=footprint)
    took = {"decode": seconds["generate"], "train": seconds["train"], "sync": seconds["sync"]}
    return {
        f"efficiency/{k}": Metric(bound / took[k], "min")
        for k, bound in bounds.items()
        if took[k] > 0
    }


def lost_metrics(update: "UpdateReport", *, seconds: Mapping[str, float]) -> dict[str, Metric]:
    """`lost/..._s`: seconds of a step lost to padding, uneven ranks and waiting. The engine records its own losses.

    Args:
        seconds: seconds in "train" and "gather" on this rank. "gather" is mostly waiting for other ranks.
    """
    padding = update.padding_tokens / update.packed_tokens if update.packed_tokens else 0.0
    most = max(update.rank_tokens, default=0)
    idle = 1 - sum(update.rank_tokens) / len(update.rank_tokens) / most if most else 0.0
    lost = {
        "padding": padding * seconds["train"],
        "imbalance": idle * seconds["train"],
        "waiting": seconds["gather"],
    }
    return {f"lost/{name}_s": Metric(value, "max") for name, value in lost.items()}


def optimizer_metrics(update: "UpdateReport", state: "RunState") -> dict[str, Metric]:
    """`optimizer/...`: the optimizer's values in this step, and counts since the start of the run."""
    values = {
        "grad_norm": update.grad_norm,
        "clipped_fraction": update.clipped_fraction,
        "learning_rate": update.learning_rate,
        "step": state.optimizer_steps,
        "prompts_seen": state.prompts_seen,
        "tokens_seen": state.tokens_seen,
    }
    return {
        f"optimizer/{key}": same_everywhere(float(value))
        for key, value in values.items()
        if value is not None
    }


def perf_metrics(
    update: "UpdateReport",
    *,
    generated_tokens: int,
    sampled: bool,
    seconds: Mapping[str, float],
    token_flops: TokenFlops,
    peak_flops: float | None = None,
    peak_memory_bytes: int = 0,
) -> dict[str, Metric]:
    """`perf/...`: throughput and waste of one step.

    Token counts are totals over all ranks; seconds are this rank's. The minimum rate over ranks is therefore that of
    the slowest rank, which the step waits for.

    Args:
        generated_tokens: tokens of the step's completions.
        sampled: whether they were sampled; demonstrations are not, and have no rate of generation.
        seconds: seconds in "generate", "train" and "step" on this rank.
        token_flops: floating-point operations of one token's forward and backward.
        peak_flops: peak FLOP/s of all devices together; without it, MFU is absent.
        peak_memory_bytes: memory in use at the end of the fullest phase (`peak_memory_bytes` of machine.py).
    """
    rates = {
        "perf/generated_tokens_per_s": _rate(generated_tokens, seconds["generate"])
        if sampled
        else None,
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
        metrics["perf/forward_only_fraction"] = same_everywhere(
            update.forward_only_tokens / update.trained_tokens
        )
    if update.packed_tokens:
        share = update.padding_tokens / update.packed_tokens
        metrics["perf/padding_fraction"] = Metric(share, weight=update.packed_tokens)
    return metrics | {"perf/peak_memory_gib": Metric(peak_memory_bytes / 2**30, "max")}


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None
