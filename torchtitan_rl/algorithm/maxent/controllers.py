"""Controllers of tau (temperature of the weights) and beta (weight of the reference).

Each is a rule from the merged statistics of a step to the next value; `ControllerState` is what must survive a restart.
The statistics are the same on every rank, so the values are too.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchtitan.config import Configurable

from torchtitan_rl.metrics.summary import same_everywhere
from torchtitan_rl.run.errors import expect
from torchtitan_rl.types import Metric

WEIGHT_ENTROPY = "maxent/weight_entropy/mean"
REFERENCE_KL = "reference/kl_k3"
EMA_DECAY = 0.9
MIN_BETA_SCALE = 1e-6
"""Least factor on beta in one step: at 0 it could never come back, for the controller multiplies."""


class Move(NamedTuple):
    """One step of a controller."""

    value: float
    """The new tau or beta."""
    target: float
    error: float
    """How far the statistic is from its target, in the controller's own terms and sign."""


class TauController(Configurable):
    """H~ <- 0.9 H~ + 0.1 H(w); log tau <- log tau + eta (H* - H~), clamped: low entropy raises the temperature."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        target: float
        """H*, the wanted mean entropy of a group's weights, in nats; at most log G can be reached."""
        start_target: float | None = None
        """Where H* starts, moving linearly to `target` over `horizon` steps; None: at `target`."""
        horizon: int = 0
        """Steps over which H* moves; 0: at once."""
        learning_rate: float = 0.05
        """eta, per nat of entropy."""
        warmup_steps: int = 0
        """tau first moves, and the entropy is first smoothed, at step warmup_steps + 1, steps counted from 0: the
        first step never moves it, as in the authors' trainer."""
        min_tau: float = 0.01
        """Smallest tau."""
        max_tau: float = 100.0
        """Largest tau."""

        def __post_init__(self) -> None:
            name = "algorithm.loss.tau_controller"
            expect(self.target >= 0, f"{name}.target", self.target, "an entropy >= 0 in nats", "Use log(G) / 2.")
            expect(self.learning_rate > 0, f"{name}.learning_rate", self.learning_rate, "a number > 0", "Use 0.05.")
            expect(self.horizon >= 0, f"{name}.horizon", self.horizon, "at least 0 steps", "Use 0 for a fixed target.")
            check_tau_range(name, self.min_tau, self.max_tau)

    def __init__(self, config: Config) -> None:
        self.config = config

    def target(self, step: int) -> float:
        """H* at a step counted from 0."""
        if self.config.start_target is None or step >= self.config.horizon:
            return self.config.target
        return self.config.start_target + (self.config.target - self.config.start_target) * step / self.config.horizon

    def warming_up(self, step: int) -> bool:
        """Whether tau and the smoothed entropy still stand at a step counted from 0."""
        return step <= self.config.warmup_steps

    def smooth(self, ema: float | None, weight_entropy: float) -> float:
        """The next H~; its first value is the entropy itself."""
        if ema is None:
            return weight_entropy
        return EMA_DECAY * ema + (1 - EMA_DECAY) * weight_entropy

    def move_tau(self, tau: float, ema: float, step: int) -> Move:
        """The next tau, after the warm-up."""
        target = self.target(step)
        log_tau = math.log(tau) + self.config.learning_rate * (target - ema)
        low, high = math.log(self.config.min_tau), math.log(self.config.max_tau)
        return Move(math.exp(min(max(log_tau, low), high)), target, target - ema)


class BetaController(Configurable):
    """e = clip(KL / KL* - 1, +-max_step); beta <- beta max(1 + e / horizon, 1e-6): a large KL raises beta."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        target: float
        """KL*, in nats per token."""
        horizon: float
        """Steps; the larger, the slower beta moves."""
        max_step: float = 0.2
        """Bound on the relative error e."""

        def __post_init__(self) -> None:
            name = "algorithm.loss.beta_controller"
            expect(self.target > 0, f"{name}.target", self.target, "a KL > 0 in nats per token", "Use 0.01.")
            expect(self.horizon > 0, f"{name}.horizon", self.horizon, "a number of steps > 0", "Use 10.")
            expect(self.max_step > 0, f"{name}.max_step", self.max_step, "a number > 0", "Use 0.2.")

    def __init__(self, config: Config) -> None:
        self.config = config

    def move_beta(self, beta: float, kl: float) -> Move:
        """The next beta."""
        limit = self.config.max_step
        error = min(max(kl / self.config.target - 1, -limit), limit)
        return Move(beta * max(1 + error / self.config.horizon, MIN_BETA_SCALE), self.config.target, error)


class MetaController(Configurable):
    """Analytic gradients: tau <- clamp(tau - eta (H - H*)); beta <- max(0, beta + eta (KL - KL*)).

    Takes the place of the other two, which then report inactive.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        target_entropy: float
        """H*, in nats."""
        target_kl: float | None = None
        """KL*, in nats per token; None leaves beta as it is."""
        learning_rate: float = 0.05
        """eta, for both."""
        min_tau: float = 0.01
        """Smallest tau."""
        max_tau: float = 100.0
        """Largest tau."""

        def __post_init__(self) -> None:
            name = "algorithm.loss.meta_controller"
            expect(
                self.target_entropy >= 0, f"{name}.target_entropy", self.target_entropy,
                "an entropy >= 0 in nats", "Use log(G) / 2.",
            )  # fmt: skip
            expect(
                self.target_kl is None or self.target_kl > 0, f"{name}.target_kl", self.target_kl,
                "None or a KL > 0 in nats per token", "Use None to leave beta alone.",
            )  # fmt: skip
            expect(self.learning_rate > 0, f"{name}.learning_rate", self.learning_rate, "a number > 0", "Use 0.05.")
            check_tau_range(name, self.min_tau, self.max_tau)

    def __init__(self, config: Config) -> None:
        self.config = config

    def move_tau(self, tau: float, weight_entropy: float) -> Move:
        """The next tau."""
        gradient = weight_entropy - self.config.target_entropy
        moved = tau - self.config.learning_rate * gradient
        return Move(min(max(moved, self.config.min_tau), self.config.max_tau), self.config.target_entropy, gradient)

    def move_beta(self, beta: float, kl: float) -> Move:
        """The next beta; `target_kl` must be set."""
        gradient = kl - self.config.target_kl
        return Move(max(0.0, beta + self.config.learning_rate * gradient), self.config.target_kl, gradient)


def check_tau_range(name: str, min_tau: float, max_tau: float) -> None:
    """Raise ValueError unless 0 < min_tau <= max_tau."""
    expect(min_tau > 0, f"{name}.min_tau", min_tau, "a number > 0", "Use 0.01.")
    expect(max_tau >= min_tau, f"{name}.max_tau", max_tau, f"at least min_tau ({min_tau})", "Use 100.")


@dataclass(slots=True)
class ControllerState:
    """What a checkpoint keeps."""

    tau: float
    beta: float
    weight_entropy_ema: float | None = None
    """H~; None before its first value."""
    step: int = 0
    """Updates so far."""


class Controllers:
    """Moves tau and beta once a step by whichever controllers are configured; with `meta`, by it alone."""

    def __init__(
        self,
        tau: float,
        beta: float,
        of_tau: TauController.Config | None,
        of_beta: BetaController.Config | None,
        meta: MetaController.Config | None,
    ) -> None:
        self.state = ControllerState(tau, beta)
        self.meta = meta and meta.build()
        self.of_tau = None if meta or not of_tau else of_tau.build()
        self.of_beta = None if meta or not of_beta else of_beta.build()
        self.moves_tau = bool(self.meta or self.of_tau)
        self.moves_beta = bool(self.of_beta or (meta and meta.target_kl is not None))
        self.inputs = (WEIGHT_ENTROPY,) * self.moves_tau + (REFERENCE_KL,) * self.moves_beta

    def load(self, state: dict[str, Any]) -> None:
        """Restore a checkpoint's state; a value that no controller owns stays the configuration's."""
        restored = ControllerState(**state)
        restored.tau = restored.tau if self.moves_tau else self.state.tau
        restored.beta = restored.beta if self.moves_beta else self.state.beta
        self.state = restored

    def after_update(self, stats: dict[str, float]) -> dict[str, Metric]:
        """Move tau and beta; without its statistic (a step where no group has a preference) each stays."""
        if not self.inputs:
            return {}
        state = self.state
        tau_move, beta_move = self._tau_move(stats.get(WEIGHT_ENTROPY)), self._beta_move(stats.get(REFERENCE_KL))
        values = move_values("tau", state.tau, tau_move) | move_values("beta", state.beta, beta_move)
        values["controller_loss"] = 0.5 * sum(move.error**2 for move in (tau_move, beta_move) if move)
        values["tau_active"] = float(tau_move is not None and self.meta is None)
        values["beta_active"] = float(beta_move is not None and self.meta is None)
        values["meta_active"] = float(bool(tau_move or beta_move) and self.meta is not None)
        if state.weight_entropy_ema is not None:
            values["weight_entropy/ema"] = state.weight_entropy_ema
        state.tau = state.tau if tau_move is None else tau_move.value
        state.beta = state.beta if beta_move is None else beta_move.value
        state.step += 1
        return {f"maxent/{key}": same_everywhere(value) for key, value in values.items()}

    def _tau_move(self, weight_entropy: float | None) -> Move | None:
        state = self.state
        if weight_entropy is None or not self.moves_tau:
            return None
        if self.meta is not None:
            return self.meta.move_tau(state.tau, weight_entropy)
        if self.of_tau.warming_up(state.step):
            return None
        state.weight_entropy_ema = self.of_tau.smooth(state.weight_entropy_ema, weight_entropy)
        return self.of_tau.move_tau(state.tau, state.weight_entropy_ema, state.step)

    def _beta_move(self, kl: float | None) -> Move | None:
        if kl is None or not self.moves_beta:
            return None
        return (self.meta or self.of_beta).move_beta(self.state.beta, kl)


def move_values(name: str, before: float, move: Move | None) -> dict[str, float]:
    """The delta, target and error of one step; only the delta, 0, where nothing moved."""
    if move is None:
        return {f"{name}_delta": 0.0}
    return {f"{name}_delta": move.value - before, f"{name}_target": move.target, f"{name}_error": move.error}
