"""Tiny random models for tests: a Qwen3, and one of each other architecture with odd dimensions."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from scripts.make_random_checkpoint import small_model
from torchtitan_rl.configs.toys.small_models import new_hf_model, small_qwen3
from torchtitan_rl.configs.toys.small_tokenizer import make_small_tokenizer
from torchtitan_rl.generator.generator import Generator
from torchtitan_rl.models.hf import local_shard
from torchtitan_rl.models.hf_config import spec_from_folder
from torchtitan_rl.models.lora.adapters import Lora, own_part
from torchtitan_rl.models.lora.lora_config import is_adapter
from torchtitan_rl.trainer.model_loader import ModelLoader
from torchtitan_rl.trainer.trainer_config import TrainerConfig
from torchtitan_rl.types import Completion, Episode, Group, Member, Prompt, ScoredCompletion

DIMENSIONS = {"vocab_size": 128, "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}
DIMENSIONS |= {"head_dim": 32, "hidden_dim": 96}
ODD_DIMENSIONS = {
    "vocab_size": 130, "hidden_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 32, "intermediate_size": 100, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "bos_token_id": None,
    "eos_token_id": None, "initializer_range": 0.2,
}  # fmt: skip
"""Heads that do not make up the hidden size, and nothing a multiple of 8; of which tensor parallelism by 2 still divides."""

_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # so that slow, middling and fast frequencies are all among them
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 1e6}
ODD = {
    "qwen3": {"rope_parameters": _ROPE},
    "qwen2": {"rope_parameters": _ROPE, "hidden_size": 192, "initializer_range": 0.1},
    "llama": {"rope_parameters": _LLAMA3_ROPE, "initializer_range": 0.1},
    "qwen3_moe": {
        "rope_parameters": _ROPE, "hidden_size": 96,  # vLLM's kernel for experts on a CPU needs a multiple of 32
        "moe_intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True, "mlp_only_layers": [1],
    },
}  # fmt: skip
"""What each architecture has besides ODD_DIMENSIONS."""


def tiny_spec():
    """The model spec of `save_tiny_checkpoint`'s folder."""
    return small_qwen3(**DIMENSIONS)


def sharded_policy(
    folder: Path,
    *,
    dtype: str = "float32",
    seq_len: int = 128,
    chunk_tokens: int = 32,
    activation_checkpoint: str = "none",
    lora: Lora | None = None,
    **degrees: int,
) -> tuple[nn.Module, BaseStateDictAdapter]:
    """Returns the policy of a folder with its weights, and the adapter of its names. Needs a process group.

    Args:
        seq_len: tokens of the longest sequence.
        chunk_tokens: tokens whose logits are computed at once.
        degrees: of the parallelism, by their names in torchtitan's config.
    """
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor", **degrees)
    set_spmd_backend(parallelism.spmd_backend)
    config = TrainerConfig(
        parallelism=parallelism, mixed_precision_param=dtype, logprob_chunk_tokens=chunk_tokens, compile_head=False,
        activation_checkpoint=activation_checkpoint,
    )  # fmt: skip
    loader = ModelLoader(
        config,
        model_spec=spec_from_folder(folder),
        folder=str(folder),
        parallel_dims=ParallelDims.from_config(parallelism, dist.get_world_size()),
        max_model_len=seq_len,
        lora=lora,
    )
    model, adapter = loader.policy(), loader.state_dict_adapter
    if lora:
        lora.attach(model, adapter)
    return model, adapter


def scale_policy(model: nn.Module, factor: float) -> None:
    """Change every weight as an optimizer does: on the shards, which a forward without backward has left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


def save_tiny_checkpoint(folder: Path, *, seed: int = 0, tie: bool = True, **dimensions: int) -> None:
    """A Hugging Face folder (config.json, model.safetensors) with random weights large enough to make sharp distributions.

    Args:
        dimensions: other than `DIMENSIONS`.
    """
    torch.manual_seed(seed)
    spec = small_qwen3(**DIMENSIONS | dimensions)
    new_hf_model(spec, tie_word_embeddings=tie, initializer_range=0.2).save_pretrained(folder)


def save_tiny_start(folder: Path) -> None:
    """As `save_tiny_checkpoint`, with a tokenizer."""
    save_tiny_checkpoint(folder)
    make_small_tokenizer(["1 + 1"], vocab_size=258).save_pretrained(folder)


def save_peaked_checkpoint(folder: Path) -> None:
    """As `save_tiny_checkpoint`, with a vocabulary and a sharpness like those of published models: most words have a
    log-probability below -20, where rounding in bfloat16 moves it by tenths."""
    torch.manual_seed(0)
    model = new_hf_model(small_qwen3(**{**DIMENSIONS, "vocab_size": 49152}), initializer_range=0.2)
    with torch.no_grad():
        model.model.norm.weight.fill_(4.0)
    model.save_pretrained(folder)


def save_odd_checkpoint(folder: Path, model_type: str, *, tie: bool = True, **settings: Any) -> None:
    """As `save_tiny_checkpoint`, of another architecture and of odd dimensions; biases and norms are random too.

    Args:
        settings: more entries of config.json.
    """
    torch.manual_seed(0)
    own = ODD.get(model_type, {})
    entries = deepcopy({**ODD_DIMENSIONS, **own, "tie_word_embeddings": tie, **settings})  # a config changes its dicts
    model = small_model(model_type, entries)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                p.add_(0.3 * torch.randn_like(p))
    model.save_pretrained(folder)


def change_adapters(model: nn.Module, version: int) -> None:
    """Give every adapter random values of its own, the same for a version in every sharding."""
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if is_adapter(name):
            random = torch.Generator().manual_seed(1000 * version + number)
            local_shard(parameter).copy_(own_part(torch.randn(parameter.shape, generator=random) / 8, parameter))


def sampled(generator: Generator, prompts: Sequence[Prompt], **how: Any) -> list[Group[Completion]]:
    """Returns the groups of `Generator.generate`, in the prompts' order."""
    return sorted(generator.generate(prompts, **how), key=lambda group: group.prompt.prompt_idx)


def members_of(groups: Sequence[Group[Completion]]) -> list[Member]:
    """Every sample as a sequence to train on, with reward 1."""
    return [
        Member(group.prompt, Episode(scored=ScoredCompletion(completion=completion, reward=1.0)))
        for group in groups
        for completion in group.samples
    ]


@contextmanager
def crowded(generator: Generator) -> Iterator[None]:
    """Leave ten free blocks in the engine's KV cache, so that some of twelve sequences are preempted."""
    generator.llm.reset_prefix_cache()
    pool = generator.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 10)
    yield
    pool.free_blocks(taken)
    assert generator.stats.metrics()["generator/preemptions"].value > 0
