"""The settings of the generator."""

from dataclasses import dataclass
from typing import Literal

from torchtitan.config import Configurable

from torchtitan_rl.fields.number import number


@dataclass(kw_only=True, slots=True)
class GeneratorConfig(Configurable.Config):
    """How the policy is sampled."""

    ranks: int = number(0, least=0, remedy="0 samples on the trainer's ranks.")
    """The job's last ranks that only sample, while the others only train. 0: every rank does both, in turn."""

    ahead: int = number(0, least=0, most=1, remedy="1 samples during the update.")
    """With `ranks`: 1 samples each step's completions while the trainers update on the step before, with weights one update
    older. 0: trainers and generators take turns."""

    tensor_parallel_degree: int = number(1, least=1, remedy="1 turns it off.")
    """Ranks that share one engine, independent of the trainer's degree. The number of replicas is world size /
    this."""

    dtype: Literal["float32", "bfloat16", "auto"] = "bfloat16"
    """Type of the engine's weights and activations. "auto": bfloat16 on a GPU, and on a CPU that has
    instructions for it."""

    max_model_len: int | Literal["auto"] = number("auto", least=1)
    """Maximum length of a prompt plus its completion, in tokens. "auto": prompts.max_prompt_tokens and the longest max_tokens
    together. Set it for conversations, in which the answers of tools and environments need room too."""

    gpu_memory_utilization: float = number(
        0.4, least=0.01, most=1, remedy="Use 0.4, the share beside the trainer."
    )
    """Fraction of the GPU's memory that the engine may use while it is awake. The trainer's weights and optimizer
    state stay in memory beside it. No effect on a CPU."""

    sleep: Literal[True, False, "auto"] = "auto"
    """Free the engine's weights and KV cache on the GPU during training. "auto": if memory needs it. No effect on
    a CPU."""

    enforce_eager: bool = False
    """Run without CUDA graphs: decoding is slower, the start is faster. A CPU engine is always eager."""

    max_num_seqs: int = number(256, least=1, most=4096)
    """Maximum number of sequences that one replica decodes at once."""

    router_replay: bool = False
    """For a mixture of experts: record which experts the engine chose for each token, and let the trainer choose the
    same, with weights from its own router (R3, arXiv 2510.11370)."""
