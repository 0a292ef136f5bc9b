"""Controllers of tau (temperature of the weights) and beta (weight of the reference).

Each maps the merged statistics of a step to the next value. The statistics are the same on every rank, so the values
are too. A checkpoint saves `ControllerState`.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torchtitan_rl.fields.number import number
from torchtitan_rl.fields.own_config import OwnConfig

WEIGHT_ENTROPY = "maxent/weight_entropy_with_neutral/mean"
REFERENCE_KL = "reference/kl_k3"
EMA_DECAY = 0.9
MIN_BETA_SCALE = 1e-6
"""Minimum factor on beta in one step. The controller multiplies, so beta could never leave 0."""


class Move(NamedTuple):
    """One step of a controller."""

    value: float
    """The new tau or beta."""
    target: float
    error: float
    """The difference between the statistic and its target, as the controller's rule defines it."""


class TauController(OwnConfig):
    """H~ <- 0.9 H~ + 0.1 H(w); log tau <- log tau + eta (H* - H~), clamped. Low entropy raises the temperature."""

    @dataclass(kw_only=True, slots=True)
    class Config(OwnConfig.Config):
        target: float = number(least=0, remedy="It is an entropy in nats: use log(G) / 2.")
        """H*, the target for the mean entropy of a group's weights, in nats. Groups with equal rewards count with the largest
        possible entropy, log G."""
        start_target: float | None = number(None, least=0)
        """Initial H*. It moves linearly to `target` over `horizon` steps. None: start at `target`."""
        horizon: int = number(0, least=0)
        """Number of steps over which H* moves from `start_target` to `target`. 0: use `target` from the start."""
        learning_rate: float = number(0.05, above=0)
        """eta, the change of log tau per nat of entropy."""
        warmup_steps: int = number(0, least=0)
        """tau stays unchanged up to and including this step, counted from 0. So the first step never moves tau, as in the
        authors' trainer. The smoothed entropy H~ starts at the entropy of the step after it."""
        min_tau: float = number(0.01, above=0)
        """Smallest tau."""
        max_tau: float = number(100.0, least="min_tau")
        """Largest tau."""

    steers: ClassVar = {"tau": WEIGHT_ENTROPY}

    def moves(self, state: "ControllerState", stats: dict[str, float]) -> dict[str, Move]:
        """Returns the next tau and updates H~ in `state`; the first H~ is the entropy itself. Neither during warm-up."""
        config = self.config
        if WEIGHT_ENTROPY not in stats or state.step <= config.warmup_steps:
            return {}
        ema = stats[WEIGHT_ENTROPY]
        if state.weight_entropy_ema is not None:
            ema = EMA_DECAY * state.weight_entropy_ema + (1 - EMA_DECAY) * ema
        state.weight_entropy_ema = ema
        target = config.target
        if config.start_target is not None and state.step < config.horizon:
            change = config.target - config.start_target
            target = config.start_target + change * state.step / config.horizon
        log_tau = math.log(state.tau) + config.learning_rate * (target - ema)
        low, high = math.log(config.min_tau), math.log(config.max_tau)
        return {"tau": Move(math.exp(min(max(log_tau, low), high)), target, target - ema)}


class BetaController(OwnConfig):
    """e = clip(KL / KL* - 1, +-max_step); beta <- beta max(1 + e / horizon, 1e-6): a large KL raises beta."""

    @dataclass(kw_only=True, slots=True)
    class Config(OwnConfig.Config):
        target: float = number(above=0, remedy="It is a KL in nats per token: use 0.01.")
        """KL*, in nats per token."""
        horizon: float = number(above=0, remedy="Use 10.")
        """Time scale in steps: beta moves more slowly with a larger horizon."""
        max_step: float = number(0.2, above=0)
        """Bound on the relative error e."""

    steers: ClassVar = {"beta": REFERENCE_KL}

    def moves(self, state: "ControllerState", stats: dict[str, float]) -> dict[str, Move]:
        if REFERENCE_KL not in stats:
            return {}
        limit, target = self.config.max_step, self.config.target
        error = min(max(stats[REFERENCE_KL] / target - 1, -limit), limit)
        scale = max(1 + error / self.config.horizon, MIN_BETA_SCALE)
        return {"beta": Move(state.beta * scale, target, error)}


class MetaController(OwnConfig):
    """Analytic gradients: tau <- clamp(tau - eta (H - H*)); beta <- max(0, beta + eta (KL - KL*)). It replaces the other two."""

    @dataclass(kw_only=True, slots=True)
    class Config(OwnConfig.Config):
        target_entropy: float = number(least=0, remedy="It is an entropy in nats: use log(G) / 2.")
        """H*, in nats."""
        target_kl: float | None = number(None, above=0)
        """KL*, in nats per token. None: beta stays constant."""
        learning_rate: float = number(0.05, above=0)
        """eta, for both tau and beta."""
        min_tau: float = number(0.01, above=0)
        """Smallest tau."""
        max_tau: float = number(100.0, least="min_tau")
        """Largest tau."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.steers = {"tau": WEIGHT_ENTROPY}
        if config.target_kl is not None:
            self.steers["beta"] = REFERENCE_KL

    def moves(self, state: "ControllerState", stats: dict[str, float]) -> dict[str, Move]:
        config = self.config
        moves: dict[str, Move] = {}
        if WEIGHT_ENTROPY in stats:
            gradient = stats[WEIGHT_ENTROPY] - config.target_entropy
            tau = state.tau - config.learning_rate * gradient
            tau = min(max(tau, config.min_tau), config.max_tau)
            moves["tau"] = Move(tau, config.target_entropy, gradient)
        if config.target_kl is not None and REFERENCE_KL in stats:
            gradient = stats[REFERENCE_KL] - config.target_kl
            beta = max(0.0, state.beta + config.learning_rate * gradient)
            moves["beta"] = Move(beta, config.target_kl, gradient)
        return moves


@dataclass(slots=True)
class ControllerState:
    """The state that a checkpoint saves."""

    tau: float
    beta: float
    weight_entropy_ema: float | None = None
    """H~; None before its first value."""
    step: int = 0
    """Number of updates so far."""
