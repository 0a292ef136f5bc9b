"""`Trainer` on `tiny`'s random Qwen3 in one process, without an engine, and a step of made-up samples for it."""

import random
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.protocols.model_spec import ModelSpec

from tests.parts.tiny import tiny_spec
from torchtitan_rl.algorithm import Algorithm
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.models.hf import hf_weights
from torchtitan_rl.models.lora.lora_config import LoraConfig
from torchtitan_rl.trainer.teachers.frozen_models import Reference
from torchtitan_rl.trainer.trainer import Trainer
from torchtitan_rl.trainer.trainer_config import LogprobGateConfig
from torchtitan_rl.types import Completion, Episode, Group, Prompt, ScoredCompletion, TurnRecord

MAX_TOKENS = 12
"""The longest completion of `scored_step`."""


def scored_step(num_prompts: int = 5, n: int = 4) -> list[Group[ScoredCompletion]]:
    """A fixed step of random tokens, lengths and rewards, one group of which has no preference.

    Every third completion of some length is a conversation: tokens that the policy did not sample lie between two turns.
    """
    rng = random.Random(0)
    groups = []
    for idx in range(num_prompts):
        prompt_ids = [rng.randrange(1, 128) for _ in range(rng.randint(2, 6))]
        samples = []
        for sample in range(n):
            length = rng.randint(1, MAX_TOKENS)
            mask = [bool(sample % 3) or not 2 <= t < 5 for t in range(length)]
            lengths = [min(length, 2), length - 5] if sample % 3 == 0 and length > 5 else [sum(mask)]
            completion = Completion(
                sample_idx=sample,
                policy_version=0,
                token_ids=[rng.randrange(1, 128) for _ in range(length)],
                sampler_logprobs=[-rng.uniform(3, 7) if sampled else 0.0 for sampled in mask],
                loss_mask=mask,
                text="",
                finish_reason="stop",
                turns=tuple(TurnRecord(text="", num_tokens=n) for n in lengths),
            )
            reward = 0.5 if idx == 2 else float(rng.choice([-1, 0, 1]))
            earned = tuple(0.25 * place for place in range(len(lengths)))
            samples.append(ScoredCompletion(completion=completion, reward=reward, turn_rewards=earned))
        groups.append(
            Group(prompt=Prompt(prompt_idx=idx, text="", token_ids=prompt_ids, expected_answer=""), samples=samples)
        )
    return groups


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
    degrees: dict[str, int] | None = None,
    **config: Any,
) -> Trainer:
    """A trainer of the model in `folder`. The process group exists.

    Args:
        model_spec: the folder's; None for the tiny Qwen3.
        generator_dtype: "bfloat16" where samples are made up. Their log-probabilities are not the policy's, so the gate is then off.
        degrees: of the parallelism, by their names in torchtitan's config.
        config: fields of the trainer's.
    """
    parallelism = ParallelismConfig(
        spmd_backend="partial_dtensor", fsdp_reshard_after_forward=reshard, **(degrees or {})
    )
    set_spmd_backend(parallelism.spmd_backend)
    gate = LogprobGateConfig(distribution=generator_dtype != "bfloat16")
    settings = {"mixed_precision_param": "float32", "logprob_chunk_tokens": 32, "logprob_gate": gate} | config
    return Trainer.Config(parallelism=parallelism, lora=lora or LoraConfig(), **settings).build(
        model_spec=model_spec or tiny_spec(),
        hf_assets_path=folder,
        parallel_dims=ParallelDims.from_config(parallelism, dist.get_world_size()),
        algorithm=(algorithm or Algorithm.Config()).build(max_completion_tokens=MAX_TOKENS),
        num_steps=num_steps,
        max_model_len=64,
        temperature=temperature,
        generator_dtype=generator_dtype,
    )


def catch_gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Returns a dict that gets the gradients of the trainer's next optimizer step, by their Hugging Face names."""
    caught: dict[str, torch.Tensor] = {}

    def catch(*_: object) -> None:
        values = [(p, p.detach().clone()) for p in trainer.model.parameters() if p.requires_grad]
        weights = partial(hf_weights, trainer.model, trainer.state_dict_adapter)
        with torch.no_grad():
            for p, _ in values:
                p.copy_(p.grad)
            exported = trainer.lora.weights if trainer.lora else weights
            caught.update({name: tensor.clone() for name, tensor in exported(torch.float32)})
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
