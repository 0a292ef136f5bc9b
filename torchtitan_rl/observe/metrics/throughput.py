"""Metrics of the optimizer, of throughput, and of where a step's time went. Values that are unknown on this machine are absent."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from torchtitan_rl.events import progress
from torchtitan_rl.summary import same_everywhere
from torchtitan_rl.types import Metric

if TYPE_CHECKING:
    from torchtitan.models.common.decoder import Decoder

    from torchtitan_rl.generator.generator_config import GeneratorConfig
    from torchtitan_rl.state import RunState
    from torchtitan_rl.trainer.optimizer import UpdateReport


PARTS = {
    "generate": ("generate",),
    "grade": ("grade",),
    "train": ("train", "reference", "teacher", "teacher_average", "hints"),
    "sync": ("sync",),
    "evaluate": ("evaluate",),
    "checkpoint": ("checkpoint/save",),
    "wait": ("gather",),
}
"""The timed phases of each part. Frozen models' forwards belong to train; gather waits for the slowest replica."""

SIDES = ("trainer", "generator")


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
        layers = [p for p in model.parameters() if id(p) not in apart]
        frozen = sum(p.numel() for p in layers if not p.requires_grad)
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
) -> dict[str, Metric]:
    """`perf/...`: throughput and waste of one step.

    Token counts are totals over all ranks; seconds are this rank's. The minimum rate over ranks is therefore that of
    the slowest rank, which the step waits for.

    Args:
        sampled: whether the completions were sampled; demonstrations are not, and have no rate of generation.
        seconds: seconds in "generate", "train" and "step".
        peak_flops: peak FLOP/s of all devices together; without it, MFU is absent.
    """
    amounts = {
        "perf/generated_tokens_per_s": (generated_tokens, "generate"),
        "perf/trained_tokens_per_s": (update.trained_tokens, "train"),
        "perf/step_tokens_per_s": (generated_tokens, "step"),
    }
    if not sampled:
        del amounts["perf/generated_tokens_per_s"]
    if peak_flops:
        amounts["perf/mfu"] = (token_flops.total(update.work) / peak_flops, "train")
    metrics = {
        key: Metric(amount / seconds[phase], "min")
        for key, (amount, phase) in amounts.items()
        if seconds[phase] > 0
    }
    if total := sum(update.rank_tokens):
        imbalance = max(update.rank_tokens) * len(update.rank_tokens) / total - 1.0
        metrics["perf/rank_imbalance"] = same_everywhere(imbalance)
        forward_only = update.forward_only_tokens / update.trained_tokens
        metrics["perf/forward_only_fraction"] = same_everywhere(forward_only)
        tokens = update.trained_tokens + update.unscored_tokens
        metrics["perf/unscored_fraction"] = same_everywhere(update.unscored_tokens / tokens)
    if update.packed_tokens:
        share = update.padding_tokens / update.packed_tokens
        metrics["perf/padding_fraction"] = Metric(share, weight=update.packed_tokens)
    return metrics


@cache
def peak_flops_per_s() -> float | None:
    """This GPU's dense bfloat16 peak by torchtitan's table; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    from torchtitan.tools.utils import get_peak_flops

    return get_peak_flops(torch.cuda.get_device_name())


def time_shares(elapsed: Callable[[str], float]) -> dict[str, Metric]:
    """`share/<part>` of this rank, merged as the mean over ranks, and `idle/<side>`; `share/other` is outside of all parts.

    `elapsed`: seconds in a phase, such as "step", since the last step's flush.
    """
    total = elapsed("step") + elapsed("checkpoint/save")
    if total <= 0:
        return {}
    seconds = {part: sum(map(elapsed, phases)) for part, phases in PARTS.items()}
    seconds["other"] = max(0.0, total - sum(seconds.values()))
    shares = {f"share/{part}": Metric(s / total) for part, s in seconds.items()}
    waits = {side: elapsed(f"idle_{side}") for side in SIDES}
    # A generator one step ahead may have waited through a longer step, with an evaluation.
    return shares | {f"idle/{side}": Metric(min(1.0, s / total)) for side, s in waits.items() if s}


class SplitNotice:
    """Says once that another `generator.ranks` would make steps clearly shorter, by the idle time of steps 2 to 11."""

    def __init__(self, config: "GeneratorConfig", trainers: int) -> None:
        self._config, self._trainers = config, trainers
        self._steps, self._seconds = 0, np.zeros(3)  # of the steps, and idle ones by side

    def see(self, elapsed: Callable[[str], float]) -> None:
        """Counts a step. `elapsed`: as for `time_shares`."""
        self._steps += 1
        if self._steps > 1:  # the first one is unlike others
            self._seconds += [elapsed("step"), *(elapsed(f"idle_{side}") for side in SIDES)]
        if self._steps != 11:
            return
        idle, now = self._seconds[1:] / self._seconds[0], self._config.ranks
        ranks, engine = now + self._trainers, self._config.tensor_parallel_degree
        step = {}  # its time by the number of generators, in steps of now
        for n in range(engine, ranks, engine):
            sides = (1 - idle) * [self._trainers / (ranks - n), now / n]
            step[n] = sides.max() if self._config.ahead else sides.sum()
        best = min(step, key=step.__getitem__)
        if (saved := step[now] - step[best]) > 0.1:
            progress(
                f"idle in 10 steps: trainers {idle[0]:.0%}, generators {idle[1]:.0%}. generator.ranks {best} would save {saved:.0%} "
                "of a step, if the work of each side divides over its ranks"
            )
