"""Qwen3 on GPUs. Download a checkpoint folder first and pass it: --hf-assets-path /models/Qwen3-0.6B.

How the settings were chosen (docs/gpu.md lists the measurements):

- Memory: each config states the GiB per GPU while the engine is awake and at the peak of an update, as computed by
  torchtitan_rl/setup/memory.py. The trainer holds 12 bytes per parameter (float32 weights and two moments), 16 during
  an update, divided over the FSDP and TP ranks. The engine takes 40 % of the GPU for bfloat16 weights and KV cache.
  setup/memory.py checks at the start whether a run fits.
- By estimated memory, at the start: as little activation checkpointing as fits, and the engine frees its memory while the
  trainer works unless all of it fits.
- Tensor parallelism: only where a model needs it. One engine per GPU decodes fastest as long as the weights leave room for the
  KV cache. From 8B on, two ranks share an engine.
- Learning rate: 1e-6, usual for full fine-tuning with GRPO; a little higher for the smallest models.
- bfloat16: the two implementations round differently, and log-probabilities of single tokens differ by tenths. So the sync
  probe allows 0.5, and token-level truncated importance sampling corrects the difference.
"""

from torchtitan_rl.core.algorithm import Algorithm, GroupMean, TokenTruncate
from torchtitan_rl.core.evaluation import Evaluation
from torchtitan_rl.core.generator import SamplingConfig
from torchtitan_rl.core.generator.generator import Generator
from torchtitan_rl.core.trainer.optimizer import AdamW
from torchtitan_rl.core.trainer.trainer_config import LRSchedule, TrainerConfig
from torchtitan_rl.library import named_models
from torchtitan_rl.library.prompts.stream import PromptStream
from torchtitan_rl.library.tasks import SumDigits
from torchtitan_rl.proof.weight_sync import WeightSync
from torchtitan_rl.setup.run_config import RunConfig


def _qwen3(
    flavor: str | None,
    *,
    folder: str,
    lr: float,
    prompts: int,
    max_tokens: int,
    generator_tp: int = 1,
) -> RunConfig:
    return RunConfig(
        model_spec=flavor and named_models.qwen3(flavor),
        hf_assets_path=folder,
        num_steps=200,
        num_prompts_per_step=prompts,
        task=SumDigits.Config(min_integers=2, max_integers=4),
        prompts=PromptStream.Config(max_prompt_tokens=256),
        sampling=SamplingConfig(n=8, max_tokens=max_tokens),
        generator=Generator.Config(tensor_parallel_degree=generator_tp, max_model_len=256 + max_tokens),
        weight_sync=WeightSync.Config(max_diff=0.5),
        algorithm=Algorithm.Config(advantage=GroupMean.Config(), mismatch=TokenTruncate.Config()),
        trainer=TrainerConfig(
            optimizer=AdamW.Config(lr=lr),
            lr_scheduler=LRSchedule(warmup_steps=10, decay_ratio=0.0),
            activation_checkpoint="auto",
        ),
        evaluation=Evaluation.Config(
            every=20,
            num_prompts=256,
            sampling=SamplingConfig(n=1, max_tokens=max_tokens, temperature=0),
            sampled=SamplingConfig(n=0, max_tokens=max_tokens),
        ),
    )


def qwen3() -> RunConfig:
    """Any dense decoder (docs/models.md); the model is read from the config.json of --hf-assets-path FOLDER.

    The settings suit 0.6B to 1.7B on one 80 GB GPU or more. A larger model needs a lower learning rate and, from 8B on,
    --generator.tensor-parallel-degree 2. The run reports at the start if it does not fit into memory.
    """
    return _qwen3(None, folder="", lr=1e-6, prompts=32, max_tokens=512)


def qwen3_0_6b() -> RunConfig:
    """Qwen3-0.6B on one or more 80 GB GPUs (FSDP). Needs the checkpoint folder.

    On one: 41 GiB awake, 66 in an update, the engine's share included. On one of 24 GB: 19, and 15 while the engine sleeps.
    """
    return _qwen3("0.6B", folder="./assets/hf/Qwen3-0.6B", lr=2e-6, prompts=32, max_tokens=512)


def qwen3_8b() -> RunConfig:
    """Qwen3-8B on 4 or more 80 GB GPUs (FSDP, 2 ranks per engine). On 4: 60 GiB awake, 50 in an update.

    Needs the checkpoint folder.
    """
    return _qwen3("8B", folder="./assets/hf/Qwen3-8B", lr=1e-6, prompts=64, max_tokens=1024, generator_tp=2)


def qwen3_30b_a3b() -> RunConfig:
    """Qwen3-30B-A3B, a mixture of experts, on 8 or more 80 GB GPUs (FSDP, 8 ranks share the experts, 4 an engine).

    On 8: 72 GiB awake, 71 in an update. Needs the checkpoint folder.
    """
    config = _qwen3("30B-A3B", folder="./assets/hf/Qwen3-30B-A3B", lr=1e-6, prompts=64, max_tokens=1024, generator_tp=4)
    config.generator.gpu_memory_utilization = 0.3
    config.trainer.parallelism.expert_parallel_degree = 8
    return config
