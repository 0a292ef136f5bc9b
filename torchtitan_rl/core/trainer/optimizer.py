"""The optimizer's settings, and what one update reports of it."""

import math
from dataclasses import dataclass

from torchtitan.components.optimizer import OptimizersContainer, default_adamw
from torchtitan.config import Configurable
from torchtitan.models.common.decoder import Decoder

from torchtitan_rl.core.config import number
from torchtitan_rl.core.types import Metric


class AdamW(Configurable):
    """The optimizer's settings; torchtitan's OptimizersContainer does the work."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        lr: float = number(1e-6, least=0, most=1, remedy="Full fine-tuning usually takes 1e-6.")
        """Peak learning rate."""

        weight_decay: float = number(0.0, least=0, below=math.inf, remedy="Use 0 for none.")
        """Decoupled weight decay."""

        betas: tuple[float, float] = number((0.9, 0.95), least=0, below=1, remedy="Use 0.9 0.95.")
        """Decay rates of the first and second moment."""

        eps: float = number(1e-8, least=0, remedy="Use 1e-8.")
        """Added to the root of the second moment."""

        def build(self, *, model: Decoder) -> OptimizersContainer:
            """The optimizer over the model's (sharded) parameters."""
            config = default_adamw(lr=self.lr, weight_decay=self.weight_decay, betas=self.betas, eps=self.eps)
            return config.build(model_parts=[model])


@dataclass(frozen=True)
class UpdateReport:
    """What one call of `Trainer.update` did; the same on every rank but for the two counts that say otherwise."""

    grad_norm: float
    """Of the last optimizer step, before clipping."""
    clipped_fraction: float
    """Share of the optimizer steps whose gradient norm was over `max_norm`."""
    update_ratio: float
    """‖update‖ / ‖weights‖ of the last optimizer step, without weight decay."""
    learning_rate: float
    optimizer_steps: int
    flops_per_token: float
    """Of forward and backward, at the step's mean sequence length."""
    rank_tokens: list[int]
    """Tokens of each data-parallel rank in one pass: those without a backward included, a prompt that several sequences share
    once."""
    trained_tokens: int
    """Tokens that went through the forward, in all passes and on all data-parallel ranks together."""
    silent_tokens: int
    """Those of them that needed no backward, for nothing in the objective has a gradient there."""
    packed_tokens: int
    """Places in this rank's micro-batches, padding included."""
    padding_tokens: int
    """Those of them that held no token."""
    metrics: list[dict[str, Metric]]
    """The objective's, of each of this rank's micro-batches and of its controllers; none on a tensor-parallel sibling, which has
    computed the same numbers."""
