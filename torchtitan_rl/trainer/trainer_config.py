"""The trainer's settings. They are apart from the trainer, whose imports take seconds: `--help` needs the settings
alone."""

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal

from torchtitan.config import Configurable, ParallelismConfig

from torchtitan_rl.fields.number import number
from torchtitan_rl.models.lora.lora_config import LoraConfig
from torchtitan_rl.trainer.optimizer import AdamW

if TYPE_CHECKING:
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer


@dataclass(kw_only=True, slots=True)
class LRSchedule(Configurable.Config):
    """Warm-up, plateau and decay, counted in steps of the controller; torchtitan's LRSchedulersContainer does the
    work."""

    warmup_steps: int = number(5, least=0, remedy="Use 0 for none.")
    """Steps in which the learning rate rises from 0 to its peak."""

    decay_ratio: float | None = number(
        0.0,
        least=0,
        most=1,
        remedy="It is the share of the steps in which the rate falls; 0 for none.",
    )
    """The share of the steps, at the end, in which the learning rate falls. 0: it stays at
    its peak. None: all steps after the warm-up."""

    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """The curve of the fall."""

    min_lr_factor: float = number(0.0, least=0, most=1)
    """The learning rate at the end, as a fraction of its peak."""

    def build(
        self, *, optimizers: "OptimizersContainer", training_steps: int
    ) -> "LRSchedulersContainer":
        from torchtitan.components.optimizer import LRSchedulersContainer

        return LRSchedulersContainer.Config(**asdict(self)).build(
            optimizers=optimizers, training_steps=training_steps
        )


@dataclass(kw_only=True, slots=True)
class LogprobGateConfig:
    """The limits of `trainer.gate.LogprobGate`."""

    max_diff: float | None = number(
        None, above=0, remedy="Leave it out for no limit on single tokens."
    )
    """Largest allowed difference of one token's log-probability. None: no limit. fp32 stays under 1e-4; bf16
    differs by tenths on rare tokens."""

    distribution: bool = True
    """Stop if a step's differences are larger than those of any healthy run, than 20 times (bfloat16: 10) this run's median so far, or
    grow with the logits, as with a temperature that the trainer does not mirror. docs/numerics.md has the limits."""


@dataclass(kw_only=True, slots=True)
class TrainerConfig(Configurable.Config):
    """`Trainer.Config`."""

    parallelism: ParallelismConfig = field(
        default_factory=lambda: ParallelismConfig(spmd_backend="partial_dtensor")
    )
    """torchtitan's degrees: data_parallel_shard_degree (FSDP2; -1: all remaining ranks), data_parallel_replicate_degree
    (HSDP), tensor_parallel_degree, and expert_parallel_degree for a mixture of experts. Pipeline and context
    parallelism are not supported."""

    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters in place of all weights, with a rank above 0."""

    optimizer: AdamW.Config = field(default_factory=AdamW.Config)
    """The optimizer and its learning rate."""

    lr_scheduler: LRSchedule = field(default_factory=LRSchedule)
    """The learning rate's curve over the run."""

    max_norm: float = number(1.0, least=1e-12, remedy="Use 1e9 for no clipping.")
    """Gradient norm to clip to."""

    max_tokens_per_microbatch: int = number(16384, least=1, remedy="Use 8192 or more.")
    """Packed tokens of one forward and backward on one data-parallel rank."""

    num_epochs: int = number(1, least=1, most=1000)
    """Passes over a step's episodes. With more than one optimizer step per batch, the log-probabilities from before the
    first are kept as log pi_old, and the policy ratio differs from 1."""

    num_minibatches: int = number(1, least=1, remedy="Use 1 for one optimizer step a batch.")
    """Optimizer steps in one pass. Each takes an equal share of the prompt groups."""

    mixed_precision_param: Literal["bfloat16", "float32", "auto"] = "bfloat16"
    """Dtype of gathered weights and activations. Master weights and gradient sums stay in float32. "auto": as in
    generator.dtype."""

    activation_checkpoint: Literal["none", "selective", "full", "auto"] = "none"
    """torchtitan's policies for recomputing activations in the backward. "auto": as much as memory needs."""

    attention: Literal["auto", "flex"] = "auto"
    """"flex": a micro-batch reads a prompt once for all its completions (FlexAttention, not measured on a GPU). "auto": FlashAttention
    for bfloat16 on a GPU, else PyTorch's SDPA."""

    compile: bool = False
    """torch.compile each transformer block."""

    compile_head: Literal[True, False, "auto"] = "auto"
    """torch.compile the passes over each tile of the output head's logits. "auto": on a GPU."""

    score_all: bool = False
    """Run the forward of every completion, also of those with a gradient of zeros, of which a step else compares 512 tokens and one
    completion in 16 with the sampler."""

    skip_nonfinite_updates: int = number(0, least=0, remedy="0 stops at the first.")
    """Updates in a row that may be skipped, and counted as optimizer/skipped_updates, if the loss or the gradient is
    NaN or infinite. One more stops training, as do weights or moments that are not finite."""

    logprob_chunk_tokens: int = number(1024, least=1)
    """Tokens whose logits exist at once, for a few thousand rows of the vocabulary (see models/logprobs.py)."""

    logprob_gate: LogprobGateConfig = field(default_factory=LogprobGateConfig)
    """The limits on the difference between trainer and sampler."""
