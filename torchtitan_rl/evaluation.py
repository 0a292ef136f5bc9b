"""Evaluation on held-out prompts: its schedule, its sampling, and the decisions made from the results."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torchtitan.config import Configurable

from torchtitan_rl.algorithm.losses.sft import HELD_OUT_LOSS
from torchtitan_rl.errors import expect
from torchtitan_rl.fields.number import number
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.types import EvaluationPass

_MEASURES = ("reward", "divergence", "length", "length_max", "clipped_fraction", "format_rate")
"""Metrics of a pass, besides its accuracies."""


@dataclass(kw_only=True, slots=True)
class EvaluationSampling(SamplingConfig):
    """How an evaluation samples."""

    max_tokens: int | Literal["auto"] = number("auto", least=1)
    """Maximum length of a completion, in tokens. "auto": sampling.max_tokens, as in training."""


class Evaluation(Configurable):
    """The schedule and the passes of the evaluation, and the decisions made from its results."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        every: int = number(10, least=0, remedy="0 turns evaluation off.")
        """Steps between evaluations. There is also one before the first step and one after the last. 0: none at all."""

        num_prompts: int = number(
            256, least=1, most=65536, remedy="evaluation.every 0 turns evaluation off."
        )
        """The number of held-out prompts, always the task's first ones."""

        sampling: SamplingConfig = field(
            default_factory=lambda: EvaluationSampling(n=1, temperature=0.0)
        )
        """Sampling of the first pass; greedy by default. With n 0 nothing is sampled: demonstrations then have their
        held-out loss alone."""

        sampled: SamplingConfig = field(default_factory=lambda: EvaluationSampling(n=0))
        """Sampling of a second pass, with temperature and n > 1, for mean@n and pass@k. Its metrics are
        evaluation/sampled/... With n 0 there is no second pass."""

        best_by: str = ""
        """A metric of the evaluation, such as evaluation/accuracy. The checkpoint of the step with its highest value
        is kept besides the newest ones. With a leading minus sign, as in
        --evaluation.best-by=-evaluation/length, the lowest value is best. Empty: no best checkpoint."""

        stop_after: int = number(0, least=0, remedy="0 never stops.")
        """End the run after this many evaluations in a row without a new best value of `best_by`; 0: never."""

        def like(self, training: SamplingConfig) -> "Evaluation.Config":
            """Returns this config with training's max_tokens where a pass has "auto"."""
            passes = {name: getattr(self, name) for name in ("sampling", "sampled")}
            longest = {"max_tokens": training.max_tokens}
            left_open = {
                n: replace(p, **longest) for n, p in passes.items() if p.max_tokens == "auto"
            }
            return replace(self, **left_open)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.passes: dict[EvaluationPass, SamplingConfig] = {}
        passes = {"evaluation": config.sampling, "evaluation/sampled": config.sampled}
        for prefix, sampling in passes.items():
            if sampling.n > 0:
                split = "eval_greedy" if sampling.temperature == 0 else "eval_sampled"
                self.passes[EvaluationPass(prefix, split)] = sampling
        self.is_best = False
        """Whether the latest results are the best so far."""
        self._sign = -1 if config.best_by.startswith("-") else 1
        self._best: float | None = None  # times the sign
        self.best_step: int | None = None
        """The step of the best results so far."""
        self._worse = 0

    @property
    def metric_names(self) -> list[str]:
        """The metrics over all held-out prompts that an evaluation may have. A member's have its name before the last part."""
        names = [HELD_OUT_LOSS]
        for its_pass, sampling in self.passes.items():
            ks = range(2, sampling.n + 1)
            shares = ["accuracy", *(f"{kind}@{k}" for kind in ("mean", "pass") for k in ks)]
            measures = [share + end for share in shares for end in ("", "_low", "_high")]
            names += [f"{its_pass.prefix}/{measure}" for measure in (*measures, *_MEASURES)]
        return names

    def due(self, step: int, num_steps: int) -> bool:
        """Whether to evaluate after `step` (0: before the first)."""
        every = self.config.every
        return bool(every) and (step % every == 0 or step == num_steps)

    @property
    def gives_up(self) -> bool:
        """Whether `stop_after` evaluations in a row were not better than the best."""
        return bool(self.config.stop_after) and self._worse >= self.config.stop_after

    @property
    def best(self) -> float | None:
        """The best value of `best_by` so far; None before the first, or without `best_by`."""
        return None if self._best is None else self._sign * self._best

    def conclude(self, metrics: Mapping[str, float], step: int) -> None:
        """Decide whether the results of `step` are the best so far. Raises UserError if `best_by` is not among them."""
        name = self.config.best_by.removeprefix("-")
        if name == "":
            return
        known = f"one of {sorted(metrics)}"
        expect(name in metrics, "evaluation.best_by", name, known, "Correct the name.")
        value = self._sign * metrics[name]
        # So that a NaN is never better than a number, and a number always better than a NaN.
        self.is_best = not math.isnan(value) and (self._best is None or not value <= self._best)
        if self.is_best:
            self._best = value
            self.best_step = step
            self._worse = 0
        else:
            self._worse += 1

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs to make the same decisions."""
        best = {"best": self._best, "best_step": self.best_step, "worse": self._worse}
        return {"best_by": self.config.best_by, **best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, unless it is about another metric."""
        if state_dict.get("best_by", self.config.best_by) != self.config.best_by:
            return
        self._best, self._worse = state_dict["best"], state_dict["worse"]
        self.best_step = state_dict.get("best_step")
