"""tau and beta over a run."""

from dataclasses import asdict, dataclass
from typing import Any

from torchtitan_rl.types import Metric

from torchtitan_rl.metrics.summary import same_everywhere
from .controllers import BetaController, MetaController, Move, TauController

WEIGHT_ENTROPY = "maxent/weight_entropy/mean"
REFERENCE_KL = "reference/kl_k3"


@dataclass(slots=True)
class ControllerState:
    """What a checkpoint keeps."""

    tau: float
    beta: float
    weight_entropy_ema: float | None = None
    """H~; None before the first step."""
    step: int = 0
    """Updates so far."""

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return asdict(self)


class Controllers:
    """Moves tau and beta once a step by whichever controllers are configured."""

    def __init__(
        self,
        tau: float,
        beta: float,
        *,
        of_tau: TauController | None,
        of_beta: BetaController | None,
        meta: MetaController | None,
    ) -> None:
        self.state = ControllerState(tau, beta)
        self.of_tau = of_tau
        self.of_beta = of_beta
        self.meta = meta

    @property
    def moves_tau(self) -> bool:
        """Whether a controller owns tau."""
        return self.of_tau is not None or self.meta is not None

    @property
    def moves_beta(self) -> bool:
        """Whether a controller owns beta."""
        return self.of_beta is not None or (self.meta is not None and self.meta.config.target_kl is not None)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The merged metrics `after_update` reads."""
        return ((WEIGHT_ENTROPY,) if self.moves_tau else ()) + ((REFERENCE_KL,) if self.moves_beta else ())

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
        entropy, kl = stats.get(WEIGHT_ENTROPY), stats.get(REFERENCE_KL)
        if self.of_tau is not None and entropy is not None:
            state.weight_entropy_ema = self.of_tau.smooth(state.weight_entropy_ema, entropy)
        tau_move, beta_move = self._tau_move(entropy), self._beta_move(kl)
        metrics = move_metrics("tau", state.tau, tau_move) | move_metrics("beta", state.beta, beta_move)
        errors = [move.error for move in (tau_move, beta_move) if move is not None]
        metrics["maxent/controller_loss"] = same_everywhere(0.5 * sum(error**2 for error in errors))
        active = {"tau": tau_move if self.meta is None else None, "beta": beta_move if self.meta is None else None}
        active["meta"] = (tau_move or beta_move) if self.meta is not None else None
        metrics |= {f"maxent/{name}_active": same_everywhere(float(move is not None)) for name, move in active.items()}
        if state.weight_entropy_ema is not None:
            metrics["maxent/weight_entropy/ema"] = same_everywhere(state.weight_entropy_ema)
        state.tau = state.tau if tau_move is None else tau_move.value
        state.beta = state.beta if beta_move is None else beta_move.value
        state.step += 1
        return metrics

    def _tau_move(self, entropy: float | None) -> Move | None:
        if entropy is None:
            return None
        if self.meta is not None:
            return self.meta.move_tau(self.state.tau, entropy)
        if self.of_tau is None or self.state.step < self.of_tau.config.warmup_steps:
            return None
        return self.of_tau.move(self.state.tau, self.state.weight_entropy_ema, self.state.step)

    def _beta_move(self, kl: float | None) -> Move | None:
        if kl is None:
            return None
        if self.meta is not None:
            return None if self.meta.config.target_kl is None else self.meta.move_beta(self.state.beta, kl)
        return None if self.of_beta is None else self.of_beta.move(self.state.beta, kl)


def move_metrics(name: str, before: float, move: Move | None) -> dict[str, Metric]:
    """`maxent/<name>_delta`, `_target` and `_error` of one step; only the delta, 0, where nothing moved."""
    if move is None:
        return {f"maxent/{name}_delta": same_everywhere(0.0)}
    return {
        f"maxent/{name}_delta": same_everywhere(move.value - before),
        f"maxent/{name}_target": same_everywhere(move.target),
        f"maxent/{name}_error": same_everywhere(move.error),
    }
