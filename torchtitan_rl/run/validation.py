"""Everything that can be known to be wrong before a process group starts."""

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchtitan_rl.device import ON_CPU
from torchtitan_rl.generator.generator import check_replicas
from torchtitan_rl.run.errors import UserError
from torchtitan_rl.trainer.policy import check_hf_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from torchtitan_rl.controller import Controller

START_CHECKPOINTS = Path("outputs/start_checkpoints")


def validate(config: "Controller.Config", *, world_size: int) -> None:
    """Check values and combinations.

    Raises:
        UserError: naming the field, the value, what was expected and the remedy.
    """
    for problem in chain(_layout_problems(config, world_size), _value_problems(config)):
        raise UserError(problem)  # the first; the later checks assume that the earlier ones hold
    check_replicas(world_size, config.generator.tensor_parallel_degree, config.num_prompts_per_step)
    try:
        config.algorithm.validate()
        config.algorithm.build().validate_group_size(config.sampling.n)
    except ValueError as error:
        raise UserError(str(error)) from error


def _layout_problems(config: "Controller.Config", world_size: int) -> Iterator[str]:
    """Degrees, ranks and devices that do not fit one another or the model."""
    spec, p, generator = config.model_spec, config.trainer.parallelism, config.generator
    if spec is None:
        yield "model_spec is not set; the config function must set it, for example model_spec=qwen3('0.6B')."
    for field, degree in (
        ("trainer.parallelism.tensor_parallel_degree", p.tensor_parallel_degree),
        ("trainer.parallelism.data_parallel_replicate_degree", p.data_parallel_replicate_degree),
        ("generator.tensor_parallel_degree", generator.tensor_parallel_degree),
    ):
        if degree < 1:
            yield f"{field} is {degree}; expected at least 1 (1 turns it off)."
    if not ON_CPU and (local := int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) > torch.cuda.device_count():
        yield f"NGPU (processes on this node) is {local}, but it has {torch.cuda.device_count()} GPUs; start that many."
    for field in ("pipeline_parallel_degree", "context_parallel_degree", "expert_parallel_degree"):
        if getattr(p, field) != 1:
            yield f"trainer.parallelism.{field} is {getattr(p, field)}; only 1 is supported. Use FSDP, HSDP and TP."
    if p.spmd_backend != "partial_dtensor":
        yield f"trainer.parallelism.spmd_backend is {p.spmd_backend!r}; only 'partial_dtensor' works with this torch."
    tp, replicate, shard = p.tensor_parallel_degree, p.data_parallel_replicate_degree, p.data_parallel_shard_degree
    fixed = tp * replicate * max(shard, 1)
    if world_size % fixed or (shard > 0 and fixed != world_size):
        yield (
            f"world size {world_size} does not fit trainer.parallelism: tensor_parallel_degree {tp} x "
            f"data_parallel_replicate_degree {replicate} x data_parallel_shard_degree {shard}; start "
            f"{fixed if shard > 0 else f'a multiple of {fixed}'} ranks (NGPU x NNODES), or change the degrees."
        )
    attention = spec.model.layers[0].attention
    divided = {
        "attention heads": attention.n_heads,
        "key-value heads": attention.n_kv_heads or attention.n_heads,
        "vocabulary entries": spec.model.vocab_size,
    }
    for field, degree in (("trainer.parallelism", tp), ("generator", generator.tensor_parallel_degree)):
        for what, number in divided.items():
            if number % degree:
                yield f"{field}.tensor_parallel_degree is {degree}, which does not divide the model's {number} {what}."


def _value_problems(config: "Controller.Config") -> Iterator[str]:
    """Numbers that cannot be meant, and lengths that do not fit."""
    spec, generator, sampling = config.model_spec, config.generator, config.sampling
    for field, tokens in (
        ("sampling.max_tokens", sampling.max_tokens),
        ("evaluation.sampling.max_tokens", config.evaluation.sampling.max_tokens),
        ("evaluation.sampled.max_tokens", config.evaluation.sampled.max_tokens if config.evaluation.sampled else 1),
    ):
        longest = config.prompts.max_prompt_tokens + tokens
        if longest > generator.max_model_len:
            yield (
                f"prompts.max_prompt_tokens {config.prompts.max_prompt_tokens} + {field} {tokens} = {longest} exceeds "
                f"generator.max_model_len {generator.max_model_len}; raise it or lower one of the others."
            )
    if generator.max_model_len > spec.model.max_seq_len:
        yield (
            f"generator.max_model_len is {generator.max_model_len}, beyond the model's {spec.model.max_seq_len} positions."
        )
    if sampling.temperature <= 0:
        yield f"sampling.temperature is {sampling.temperature}; training needs more than 0 (1.0 is usual)."
    for name in ("num_steps", "num_prompts_per_step"):
        if getattr(config, name) < 1:
            yield f"{name} is {getattr(config, name)}; expected at least 1."
    for name in ("num_epochs", "num_minibatches", "max_tokens_per_microbatch", "logprob_chunk_tokens"):
        if getattr(config.trainer, name) < 1:
            yield f"trainer.{name} is {getattr(config.trainer, name)}; expected at least 1."
    if not config.trainer.max_norm > 0:
        yield f"trainer.max_norm is {config.trainer.max_norm}; expected more than 0 (a large number for no clipping)."
    if config.trainer.compile and ON_CPU:
        yield "trainer.compile is set, but the CPU attention cannot be compiled; leave it off without a GPU."
    if config.evaluation.num_prompts < 1:
        yield (
            f"evaluation.num_prompts is {config.evaluation.num_prompts}; expected at least 1 (evaluation.every 0 turns "
            "evaluation off)."
        )
    if config.trainer.num_minibatches > config.num_prompts_per_step:
        yield (
            f"trainer.num_minibatches {config.trainer.num_minibatches} is more than num_prompts_per_step "
            f"{config.num_prompts_per_step}; a mini-batch holds whole prompt groups."
        )


def check_tokenizer(tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> None:
    """Check that every token has a row in the model's embedding and that completions can end.

    Raises:
        UserError: naming `hf_assets_path`.
    """
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        raise UserError(
            f"hf_assets_path: the tokenizer in {tokenizer.name_or_path} has token id {largest}, but the model's vocab_size "
            f"is {vocab_size}. Use the tokenizer files that belong to the checkpoint."
        )
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"hf_assets_path: the tokenizer in {tokenizer.name_or_path} has no eos_token, so no completion could end. Set "
            "eos_token in its tokenizer_config.json."
        )


def prepare_start(config: "Controller.Config") -> None:
    """Make the task's own small checkpoint where no folder is configured, and check the folder against the model."""
    if not config.hf_assets_path:
        from torchtitan_rl.tasks.warm_start import ensure_checkpoint

        config.hf_assets_path = str(ensure_checkpoint(START_CHECKPOINTS))
    check_hf_folder(config.hf_assets_path, config.model_spec)
