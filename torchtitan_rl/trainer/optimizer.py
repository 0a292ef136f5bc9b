"""The optimizer's settings and the report of an update."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torchtitan.config import Configurable

from torchtitan_rl.fields.number import number
from torchtitan_rl.fields.own_config import OwnConfig
from torchtitan_rl.types import FloatArray, Metric

if TYPE_CHECKING:
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.models.common.decoder import Decoder


class AdamW(OwnConfig):
    """The optimizer's settings; torchtitan's OptimizersContainer does the work."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        lr: float = number(1e-6, least=0, most=1, remedy="Full fine-tuning usually takes 1e-6.")
        """Peak learning rate."""

        weight_decay: float = number(0.0, least=0, most=100, remedy="Use 0 for none.")
        """Decoupled weight decay of every trained parameter, norms and biases too."""

        betas: tuple[float, float] = number(
            (0.9, 0.95), least=0, below=1, remedy="0.9 and 0.95 are usual."
        )
        """Decay rates of the first and second moment."""

        eps: float = number(1e-8, above=0, most=1, remedy="Use 1e-8.")
        """Added to the square root of the second moment."""

        on_host: Literal[True, False, "auto"] = "auto"
        """Keep the moments in the host's memory, and on the GPU only what a step computes with. The run is the same, bit by
        bit. "auto": if memory needs it. Without a GPU it saves nothing."""

        def build(self, *, model: "Decoder") -> "OptimizersContainer":
            from torchtitan.components.optimizer import default_adamw

            from torchtitan_rl.trainer.host_adamw import HostOptimizers

            config = default_adamw(
                lr=self.lr, weight_decay=self.weight_decay, betas=self.betas, eps=self.eps
            )
            if self.on_host is True:
                return HostOptimizers(config, model_parts=[model])
            return config.build(model_parts=[model])


@dataclass(frozen=True)
class UpdateReport:
    """The results of one `Trainer.update`. All fields but `packed_tokens`, `padding_tokens` and `metrics` are the same on every rank."""

    grad_norm: float
    """Gradient norm of the last optimizer step, before clipping."""
    clipped_fraction: float
    """Fraction of the optimizer steps with a gradient norm over `max_norm`."""
    learning_rate: float
    optimizer_steps: int
    work: FloatArray
    """[2, 3] `packing.count_work` over all passes and ranks: of forwards, and of backwards, which not every
    micro-batch has."""
    rank_tokens: list[int]
    """Tokens in the forwards of each data-parallel rank in one pass. A shared prompt counts once."""
    packed_tokens: int
    """Size of this rank's micro-batches, with padding."""
    padding_tokens: int
    """Padding in this rank's micro-batches."""
    unscored_tokens: int
    """Tokens of all passes and ranks without a forward: the objective has no gradient there, and other tokens were drawn for the checks."""
    metrics: list[dict[str, Metric]]
    """Metrics of the step's groups, of each of this rank's micro-batches, of the controllers and of the experts. Empty on
    all but the first tensor-parallel rank, because they compute the same values."""

    @property
    def trained_tokens(self) -> int:
        """Tokens in the forwards of all passes and data-parallel ranks."""
        return int(self.work[0, 0])

    @property
    def forward_only_tokens(self) -> int:
        """The part of `trained_tokens` without a backward, because the objective has no gradient there."""
        return int(self.work[0, 0] - self.work[1, 0])
