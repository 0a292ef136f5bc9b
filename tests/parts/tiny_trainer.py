"""`Trainer` on `tiny`'s random Qwen3 in one process, without an engine, and a step of made-up samples for it."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.protocols.model_spec import ModelSpec

from tests.integration.invariance import MAX_TOKENS, scored_step
from tests.parts.tiny import tiny_spec
from torchtitan_rl.algorithm import Algorithm
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.fields.lora_config import LoraConfig
from torchtitan_rl.models.hf import hf_weights
from torchtitan_rl.models.lora.adapters import Lora
from torchtitan_rl.trainer.build_trainer import build_trainer
from torchtitan_rl.trainer.teachers.frozen_models import Reference
from torchtitan_rl.trainer.trainer import Trainer
from torchtitan_rl.trainer.trainer_config import LogprobGateConfig
from torchtitan_rl.types import Episode, Group


def tiny_trainer(
    folder: str,
    algorithm: Algorithm.Config | None = None,
    reshard: str = "default",
    num_steps: int = 10,
    *,
    model_spec: ModelSpec | None = None,
    lora: LoraConfig | None = None,
    temperature: float = 1.0,
    generator_dtype: str = "bfloat16",
    **config: Any,
) -> Trainer:
    """A trainer of the model in `folder`. The process group of one rank exists.

    Args:
        model_spec: the folder's; None for the tiny Qwen3.
        generator_dtype: "bfloat16" where samples are made up. Their log-probabilities are not the policy's, so the gate is then off.
        config: fields of the trainer's.
    """
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor", fsdp_reshard_after_forward=reshard)
    set_spmd_backend(parallelism.spmd_backend)
    lora = lora or LoraConfig()
    gate = LogprobGateConfig(distribution=generator_dtype != "bfloat16")
    settings = {"mixed_precision_param": "float32", "logprob_chunk_tokens": 32, "logprob_gate": gate} | config
    return build_trainer(
        Trainer.Config(parallelism=parallelism, lora=lora, **settings),
        model_spec=model_spec or tiny_spec(),
        hf_assets_path=folder,
        parallel_dims=ParallelDims.from_config(parallelism, 1),
        algorithm=(algorithm or Algorithm.Config()).build(max_completion_tokens=MAX_TOKENS),
        num_steps=num_steps,
        max_model_len=64,
        temperature=temperature,
        generator_dtype=generator_dtype,
        dump_folder="",
        policy_lora=Lora.of(lora),
    )


def catch_gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Returns a dict that gets the gradients of the trainer's next optimizer step, by their Hugging Face names."""
    caught: dict[str, torch.Tensor] = {}

    def catch(*_: object) -> None:
        values = [(p, p.detach().clone()) for p in trainer.model.parameters()]
        with torch.no_grad():
            for p, _ in values:
                p.copy_(p.grad)
            exported = hf_weights(trainer.model, trainer.state_dict_adapter, torch.float32)
            caught.update({name: tensor.clone() for name, tensor in exported})
            for p, value in values:
                p.copy_(value)

    trainer.optimizer.optimizers[0].register_step_pre_hook(catch)
    return caught


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
