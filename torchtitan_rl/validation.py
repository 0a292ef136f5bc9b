"""Everything that can be known to be wrong before a process group starts."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_rl.errors import UserError
from torchtitan_rl.generator.generator import check_replicas
from torchtitan_rl.trainer.policy import check_hf_folder

if TYPE_CHECKING:
    from torchtitan_rl.controller import Controller

START_CHECKPOINTS = Path("outputs/start_checkpoints")


def validate(config: "Controller.Config", *, world_size: int) -> None:
    """Check values and combinations.

    Raises:
        UserError: naming the field, the value, what was expected and the remedy.
    """
    for problem in _problems(config, world_size):
        raise UserError(problem)
    check_replicas(world_size, config.generator.tensor_parallel_degree, config.num_prompts_per_step)
    try:
        config.algorithm.validate()
        config.algorithm.build().validate_group_size(config.sampling.n)
    except ValueError as error:
        raise UserError(str(error)) from error


def _problems(config: "Controller.Config", world_size: int) -> Iterator[str]:
    spec, p, generator, sampling = config.model_spec, config.trainer.parallelism, config.generator, config.sampling
    if spec is None:
        yield "model_spec is not set; the config function must set it, for example model_spec=qwen3('0.6B')."
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
    longest = config.prompts.max_prompt_tokens + sampling.max_tokens
    if longest > generator.max_model_len:
        yield (
            f"prompts.max_prompt_tokens {config.prompts.max_prompt_tokens} + sampling.max_tokens {sampling.max_tokens} = "
            f"{longest} exceeds generator.max_model_len {generator.max_model_len}; raise it or lower one of the others."
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
    if config.trainer.num_minibatches > config.num_prompts_per_step:
        yield (
            f"trainer.num_minibatches {config.trainer.num_minibatches} is more than num_prompts_per_step "
            f"{config.num_prompts_per_step}; a mini-batch holds whole prompt groups."
        )


def prepare_start(config: "Controller.Config") -> None:
    """Make the task's own small checkpoint where no folder is configured, and check the folder against the model."""
    if not config.hf_assets_path:
        from torchtitan_rl.tasks.warm_start import ensure_checkpoint

        config.hf_assets_path = str(ensure_checkpoint(START_CHECKPOINTS))
    check_hf_folder(config.hf_assets_path, config.model_spec)
