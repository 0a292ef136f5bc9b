"""Published sizes of Qwen3 that learn sums on GPUs of 80 GB.

The checkpoint is that in assets/hf/, for example assets/hf/Qwen3-0.6B, if there is one,
and else the hub's. Another folder: --hf-assets-path /models/Qwen3-0.6B.

How the settings were chosen, beside those of configs/tasks.py (docs/measured/gpu.md lists the measurements):

- Memory: each config states the GiB per GPU while the engine is awake and at the peak of an update, as computed by
  torchtitan_rl/run/memory.py. The trainer holds 12 bytes per parameter (float32 weights and two moments), 16 during
  an update, divided over the FSDP and TP ranks. The engine takes 40 % of the GPU for bfloat16 weights and KV cache.
  run/memory.py checks at the start whether a run fits.
- By estimated memory, at the start: as little activation checkpointing as fits, and the engine frees its memory while the
  trainer works unless all of it fits.
- Tensor parallelism: only where a model needs it. One engine per GPU decodes fastest as long as the weights leave room for the
  KV cache. From 8B on, two ranks share an engine.
"""

from pathlib import Path

from torchtitan_rl.config import RunConfig
from torchtitan_rl.configs.tasks import sums
from torchtitan_rl.fields.references import from_caller


def _sized(size: str, *, generator_tp: int = 1) -> RunConfig:
    config = sums()
    folder = f"./assets/hf/Qwen3-{size}"
    config.hf_assets_path = folder if Path(from_caller(folder)).is_dir() else f"Qwen/Qwen3-{size}"
    config.generator.tensor_parallel_degree = generator_tp
    return config


def _large(size: str, *, generator_tp: int) -> RunConfig:
    config = _sized(size, generator_tp=generator_tp)
    config.num_prompts_per_step = 64
    config.sampling.max_tokens = 1024
    return config


def qwen3_0_6b() -> RunConfig:
    """Qwen3-0.6B on one or more GPUs.

    On one: 41 GiB awake, 66 in an update, the engine's share included. On one of 24 GB: 19, and 15 while the engine sleeps.
    """
    config = _sized("0.6B")
    config.trainer.optimizer.lr = 2e-6
    return config


def qwen3_1_7b() -> RunConfig:
    """Qwen3-1.7B on one or more GPUs.

    On one: 54 GiB awake, 65 in an update.
    """
    return _sized("1.7B")


def qwen3_4b() -> RunConfig:
    """Qwen3-4B on 2 or more GPUs.

    On 2: 57 GiB awake, 42 in an update.
    """
    return _large("4B", generator_tp=1)


def qwen3_8b() -> RunConfig:
    """Qwen3-8B on 4 or more GPUs.

    FSDP, 2 ranks per engine. On 4: 58 GiB awake, 49 in an update.
    """
    return _large("8B", generator_tp=2)


def qwen3_14b() -> RunConfig:
    """Qwen3-14B on 8 or more GPUs.

    FSDP, 2 ranks per engine. On 8: 57 GiB awake, 51 in an update.
    """
    return _large("14B", generator_tp=2)


def qwen3_30b_a3b() -> RunConfig:
    """Qwen3-30B-A3B, a mixture of experts, on 8 or more GPUs.

    FSDP; 8 ranks share the experts, 4 an engine. On 8: 71 GiB awake, 70 in an update.
    """
    config = _large("30B-A3B", generator_tp=4)
    config.generator.gpu_memory_utilization = 0.3
    config.trainer.parallelism.expert_parallel_degree = 8
    return config
