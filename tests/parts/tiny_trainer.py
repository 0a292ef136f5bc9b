"""`Trainer` on `tiny`'s random Qwen3 in one process, without an engine, and a step of made-up samples for it."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend

from tests.integration.invariance import MAX_TOKENS, scored_step
from tests.parts.tiny import tiny_spec
from torchtitan_rl.core.algorithm import Algorithm
from torchtitan_rl.core.algorithm.episodes import draft_episodes
from torchtitan_rl.core.trainer.trainer import Trainer
from torchtitan_rl.core.types import Episode, Group
from torchtitan_rl.library.frozen_models import Reference
from torchtitan_rl.library.models.build import build_trainer


def tiny_trainer(
    folder: str,
    algorithm: Algorithm.Config | None = None,
    reshard: str = "default",
    num_steps: int = 10,
    **config: Any,
) -> Trainer:
    """A trainer of the model in `folder`. The process group of one rank exists. `config`: fields of the trainer's."""
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor", fsdp_reshard_after_forward=reshard)
    set_spmd_backend(parallelism.spmd_backend)
    settings = {"mixed_precision_param": "float32", "logprob_chunk_tokens": 32} | config
    return build_trainer(
        Trainer.Config(parallelism=parallelism, **settings),
        model_spec=tiny_spec(),
        hf_assets_path=folder,
        parallel_dims=ParallelDims.from_config(parallelism, 1),
        algorithm=(algorithm or Algorithm.Config()).build(max_completion_tokens=MAX_TOKENS),
        num_steps=num_steps,
        max_model_len=64,
        temperature=1.0,
        generator_dtype="bfloat16",  # the log-probabilities that these tests make up are not the policy's
        dump_folder="",
    )


def credited(trainer: Trainer, **step: Any) -> list[Group[Episode]]:
    """A step of made-up samples with the credit of the trainer's algorithm. `step`: of `scored_step`."""
    groups = draft_episodes(scored_step(**step))
    if trainer.algorithm.needs_reference:
        Reference(trainer).add_logprobs(groups)
    trainer.algorithm.credit.assign(groups)
    return groups


def weights(trainer: Trainer) -> torch.Tensor:
    """All of them in one vector, a copy."""
    values = (p.full_tensor() if isinstance(p, DTensor) else p for p in trainer.model.parameters())
    return torch.cat([value.detach().double().flatten() for value in values])
