"""Controllers of tau (temperature of the weights) and beta (weight of the reference).

Each maps the merged statistics of a step to the next value. The statistics are the same on every rank, so the values
are too. A checkpoint saves `ControllerState`.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

from torchtitan_rl.fields.number import number
from torchtitan_rl.fields.own_config import OwnConfig
from torchtitan_rl.summary import same_everywhere
from torchtitan_rl.types import Metric

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
    clamped: bool
    """Whether a limit of the controller held the value back."""


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

    def target(self, step: int) -> float:
        """Returns H* at a step, counted from 0."""
        start, target, horizon = self.config.start_target, self.config.target, self.config.horizon
        return (
            target
            if start is None or step >= horizon
            else start + (target - start) * step / horizon
        )

    def moves(self, state: "ControllerState", stats: dict[str, float]) -> dict[str, Move]:
        """Returns the next tau and updates H~ in `state`; the first H~ is the entropy itself. Neither during warm-up."""
        if WEIGHT_ENTROPY not in stats or state.step <= self.config.warmup_steps:
            return {}
        entropy, ema = stats[WEIGHT_ENTROPY], state.weight_entropy_ema
        ema = state.weight_entropy_ema = (
            entropy if ema is None else EMA_DECAY * ema + (1 - EMA_DECAY) * entropy
        )
        target = self.target(state.step)
        log_tau = math.log(state.tau) + self.config.learning_rate * (target - ema)
        low, high = math.log(self.config.min_tau), math.log(self.config.max_tau)
        tau = math.exp(min(max(log_tau, low), high))
        return {"tau": Move(tau, target, target - ema, not low <= log_tau <= high)}


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
        relative = stats[REFERENCE_KL] / target - 1
        error = min(max(relative, -limit), limit)
        scale = max(1 + error / self.config.horizon, MIN_BETA_SCALE)
        return {
            "beta": Move(
                state.beta * scale, target, error, error != relative or scale == MIN_BETA_SCALE
            )
        }


class MetaController(OwnConfig):
    """Analytic gradients: tau <- clamp(tau - eta (H - H*)); beta <- max(0, beta + eta (KL - KL*)).

    It replaces the other two controllers, which then report inactive.
    """

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
        self.steers = {"tau": WEIGHT_ENTROPY} | (
            {} if config.target_kl is None else {"beta": REFERENCE_KL}
        )

    def moves(self, state: "ControllerState", stats: dict[str, float]) -> dict[str, Move]:
        """Returns the next tau and, if `target_kl` is set, the next beta."""
        config, moves = self.config, {}
        if WEIGHT_ENTROPY in stats:
            gradient = stats[WEIGHT_ENTROPY] - config.target_entropy
            free = state.tau - config.learning_rate * gradient
            tau = min(max(free, config.min_tau), config.max_tau)
            moves["tau"] = Move(tau, config.target_entropy, gradient, tau != free)
        if "beta" in self.steers and REFERENCE_KL in stats:
            gradient = stats[REFERENCE_KL] - config.target_kl
            free = state.beta + config.learning_rate * gradient
            moves["beta"] = Move(max(0.0, free), config.target_kl, gradient, free < 0)
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


class Controllers:
    """Moves tau and beta once per step with the configured controllers."""

    def __init__(self, tau: float, beta: float, configs: list[OwnConfig.Config | None]) -> None:
        self.state = ControllerState(tau, beta)
        self.active = [config.build() for config in configs if config is not None]
        self.steered = {
            name: key for controller in self.active for name, key in controller.steers.items()
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restores a checkpoint's state. A value that no controller moves keeps its configured value."""
        owned = {
            name: value
            for name, value in state.items()
            if name in self.steered or name not in ("tau", "beta")
        }
        self.state = ControllerState(**(asdict(self.state) | owned))

    def after_update(self, stats: dict[str, float]) -> dict[str, Metric]:
        """Moves tau and beta and returns metrics. A value stays if its statistic is missing in this step."""
        if not self.active:
            return {}
        state, moves, meta = self.state, {}, isinstance(self.active[0], MetaController)
        for controller in self.active:
            moves |= controller.moves(state, stats)
        values = {"controller_loss": 0.5 * sum(move.error**2 for move in moves.values())}
        values["meta_active"] = float(meta and bool(moves))
        for name in ("tau", "beta"):
            values[f"{name}_active"] = float(name in moves and not meta)
            values[f"{name}_clamped"] = float(name in moves and moves[name].clamped)
            values[f"{name}_delta"] = (
                moves[name].value - getattr(state, name) if name in moves else 0.0
            )
        for name, move in moves.items():
            values |= {f"{name}_target": move.target, f"{name}_error": move.error}
            setattr(state, name, move.value)
        if state.weight_entropy_ema is not None:
            values["weight_entropy/ema"] = state.weight_entropy_ema
        state.step += 1
        return {f"maxent/{key}": same_everywhere(value) for key, value in values.items()}
