"""Everything that can be known to be wrong before a process group starts."""

import math
import os
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from torchtitan_rl import cpu
from torchtitan_rl.core.algorithm.part import check_fields
from torchtitan_rl.core.device import ON_CPU, gpu_memory_bytes
from torchtitan_rl.core.errors import expect
from torchtitan_rl.core.generator.engine_options import CPU_HEAD_DIMS
from torchtitan_rl.core.generator.generator import check_replicas
from torchtitan_rl.core.generator.sampling import SamplingConfig
from torchtitan_rl.observability.select import Selection
from torchtitan_rl.observability.sinks import chosen_sinks
from torchtitan_rl.resilience.death import GIB, node_bytes
from torchtitan_rl.setup.memory import check_memory

if TYPE_CHECKING:
    from torchtitan_rl.setup.config import RunConfig

_MANY = 10**12
"""No count is larger but by a slip: what overflows later, far from here, is refused."""

_LIMITS: dict[str, tuple[float, float, str]] = {
    "seed": (0, 2**32 - 1, "Use 0, 1, 2, ..."),  # numpy, in vLLM, takes no larger
    "num_steps": (1, 10**9, "Use 50 or more."),
    "num_prompts_per_step": (
        1,
        65536,
        "Use 16 or more; a step keeps every prompt's completions in memory on each rank.",
    ),
    "prompts.read_ahead": (0, 65536, "Use 64; 0 reads each prompt when it is asked for."),
    "prompts.max_prompt_tokens": (1, math.inf, "Set it to the longest prompt you want to allow, in tokens."),
    "evaluation.every": (0, math.inf, "0 turns evaluation off."),
    "evaluation.num_prompts": (1, 65536, "evaluation.every 0 turns evaluation off."),
    "generator.tensor_parallel_degree": (1, math.inf, "1 turns it off."),
    "generator.gpu_memory_utilization": (0.01, 1, "Use 0.4, the share beside the trainer."),
    "generator.max_num_seqs": (1, math.inf, "Use 256."),
    "weight_sync.check_interval": (0, math.inf, "0 probes the first push alone; every push is proven."),
    "weight_sync.max_diff": (0, math.inf, "Leave it out for the dtype's own."),
    "trainer.logprob_gate.max_diff": (0, math.inf, "Leave it out for no limit on single tokens."),
    "trainer.max_norm": (1e-12, math.inf, "Use 1e9 for no clipping."),
    "metrics.console_every": (0, math.inf, "0 shows no panels."),
    "metrics.queue_size": (1, math.inf, "64 is usual."),
    "metrics.seed": (0, math.inf, "Use 0."),
    "metrics.store_bytes": (0, math.inf, "Use 2147483648."),
    "metrics.max_traces_per_step": (0, math.inf, "0 logs none."),
    "trainer.parallelism.tensor_parallel_degree": (1, math.inf, "1 turns it off."),
    "trainer.parallelism.data_parallel_replicate_degree": (1, math.inf, "1 turns it off."),
    "trainer.num_epochs": (1, math.inf, "Use 1."),
    "trainer.num_minibatches": (1, math.inf, "Use 1 for one optimizer step a batch."),
    "trainer.skip_nonfinite_updates": (0, math.inf, "0 stops at the first."),
    "trainer.max_tokens_per_microbatch": (1, math.inf, "Use 8192 or more."),
    "trainer.logprob_chunk_tokens": (1, math.inf, "Use 1024."),
    "trainer.optimizer.lr": (0, 1, "Full fine-tuning usually takes 1e-6."),
    "trainer.optimizer.weight_decay": (0, math.inf, "Use 0 for none."),
    "trainer.optimizer.eps": (0, math.inf, "Use 1e-8."),
    "trainer.lr_scheduler.warmup_steps": (0, math.inf, "Use 0 for none."),
    "trainer.lr_scheduler.decay_ratio": (0, 1, "It is the share of the steps in which the rate falls; 0 for none."),
    "trainer.lr_scheduler.min_lr_factor": (0, 1, "Use 0."),
    "checkpoint.interval": (1, math.inf, "Use 50; checkpoint.enable False saves none."),
    "checkpoint.keep_latest_k": (0, math.inf, "Use 2; 0 keeps all."),
    "watchdog.notice_seconds": (1, math.inf, "Use 25."),
    "watchdog.limit_seconds": (1, math.inf, "Use 1500."),
    "comm.init_timeout_seconds": (1, math.inf, "Use 1800."),
}
"""Field: smallest and largest value, both allowed, and the remedy. None is allowed where the field's type has it."""

_ONLY: dict[str, tuple[object, str, str]] = {
    "trainer.parallelism.pipeline_parallel_degree": (1, "as it is not supported", "Use FSDP, HSDP and TP."),
    "trainer.parallelism.context_parallel_degree": (1, "as it is not supported", "Use FSDP, HSDP and TP."),
    "trainer.parallelism.expert_parallel_degree": (1, "as it is not supported", "Use FSDP, HSDP and TP."),
    "trainer.parallelism.spmd_backend": ("partial_dtensor", "the only one for this torch", "Leave it at its default."),
    "trainer.lr_scheduler.total_steps": (None, "as it is num_steps", "Set num_steps."),
    "comm.train_timeout_seconds": (100, "as it has no effect", "Set comm.init_timeout_seconds."),
    "comm.mode": ("default", "as training is real", "Leave it at its default."),
    # The trainer scores with the whole vocabulary: a truncated sampler's probabilities are others.
    "sampling.top_p": (1, "as a truncated sampler biases ratios", "Set it for evaluation.sampling alone."),
    "sampling.top_k": (0, "as a truncated sampler biases ratios", "Set it for evaluation.sampling alone."),
}
"""Field: the one value that works, why, and the remedy."""


def validate(config: "RunConfig", *, world_size: int) -> None:
    """Check values and combinations.

    Raises:
        UserError: naming the field, the value, what was expected and the remedy.
    """
    expect(
        config.task is not None,
        "task",
        None,
        "one, for example task=SumDigits.Config()",
        "The config function must set it.",
    )
    for field, (smallest, largest, remedy) in _LIMITS.items():
        value = attrgetter(field)(config)
        expected = f"{smallest} or more" if largest == math.inf else f"between {smallest} and {largest}"
        expect(value is None or (math.isfinite(value) and smallest <= value <= largest), field, value, expected, remedy)
        expect(not isinstance(value, int) or value <= _MANY, field, value, f"at most {_MANY}", remedy)
    for field, (only, why, remedy) in _ONLY.items():
        value = attrgetter(field)(config)
        expect(value == only, field, value, f"{only!r}, {why}", remedy)
    for part in ("generator", "trainer", "grader", "metrics"):
        check_fields(getattr(config, part), part)
    cpu.mode()
    chosen_sinks(config.metrics.sinks)
    Selection(config.metrics.select)
    config.evaluation.build()
    _check_layout(config, world_size)
    _check_training(config)
    _check_lengths(config)
    _check_cpu_cache()
    _check_members(config)
    check_replicas(world_size, config.generator.tensor_parallel_degree, config.num_prompts_per_step)
    for sampling in (config.sampling, *config.task.samplings().values()):
        config.algorithm.build(max_completion_tokens=sampling.max_tokens).validate_sampling(sampling.n)
    if config.model_spec is not None:
        check_model(config, world_size=world_size)


def _check_cpu_cache() -> None:
    """Of an environment variable, as vLLM reads it on a CPU."""
    given, gib = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"), node_bytes() // GIB
    expected = f"a whole number of GiB for each rank, between 1 and the node's {gib}"
    holds = not ON_CPU or (given.isdecimal() and 1 <= int(given) <= gib)
    expect(holds, "VLLM_CPU_KVCACHE_SPACE", given, expected, "Leave it out for 1.")


def check_model(config: "RunConfig", *, world_size: int) -> None:
    """Check that degrees, lengths and memory fit the model: as soon as it is known, from the config or from its folder.

    Raises:
        UserError: as `validate`.
    """
    model, longest = config.model_spec.model, config.generator.max_model_len
    attention = model.layers[0].attention
    divided = {
        "attention heads": attention.n_heads,
        "key-value heads": attention.n_kv_heads or attention.n_heads,
        "vocabulary entries": model.vocab_size,
    }
    tp = config.trainer.parallelism.tensor_parallel_degree
    for field, degree in (("trainer.parallelism", tp), ("generator", config.generator.tensor_parallel_degree)):
        for what, number in divided.items():
            expect(
                number % degree == 0, f"{field}.tensor_parallel_degree", degree, f"a divisor of the model's {number} {what}",
                "Use another degree.",
            )  # fmt: skip
    for field, sampling in _samplings(config).items():
        token, known = max(sampling.stop_token_ids, default=0), f"token ids below the model's {model.vocab_size}"
        expect(token < model.vocab_size, f"{field}.stop_token_ids", token, known, "Use the tokenizer's ids.")
    fits = f"at most the model's {model.max_seq_len} positions"
    expect(longest <= model.max_seq_len, "generator.max_model_len", longest, fits, "Lower it.")
    expect(
        not ON_CPU or attention.head_dim in CPU_HEAD_DIMS, "hf_assets_path", config.hf_assets_path,
        f"a model whose head_dim is one of {CPU_HEAD_DIMS}, which vLLM has on a CPU, but it is {attention.head_dim}",
        "Use another model, or a GPU.",
    )  # fmt: skip
    if gpu_bytes := gpu_memory_bytes():
        check_memory(config, world_size=world_size, gpu_bytes=gpu_bytes)


def _check_layout(config: "RunConfig", world_size: int) -> None:
    """Degrees, ranks and devices fit one another."""
    p, local = config.trainer.parallelism, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if gpus := torch.cuda.device_count():
        expect(local <= gpus, "NGPU", local, f"at most the {gpus} GPUs of this node", "Start that many processes.")
    tp, replicate, shard = p.tensor_parallel_degree, p.data_parallel_replicate_degree, p.data_parallel_shard_degree
    expect(
        shard == -1 or shard >= 1, "trainer.parallelism.data_parallel_shard_degree", shard, "-1 or at least 1",
        "-1 takes the ranks that are left over.",
    )  # fmt: skip
    fixed = tp * replicate * max(shard, 1)
    expect(
        world_size == fixed or (shard < 0 and world_size % fixed == 0),
        "world size (NGPU x NNODES)",
        world_size,
        f"{fixed if shard > 0 else f'a multiple of {fixed}'}, for trainer.parallelism has tensor_parallel_degree {tp} x "
        f"data_parallel_replicate_degree {replicate} x data_parallel_shard_degree {shard}",
        "Start as many ranks, or change the degrees.",
    )


def _check_lengths(config: "RunConfig") -> None:
    """Every way of sampling is possible, and its longest sequence fits the engine."""
    config.conversations.check()
    longest = config.generator.max_model_len
    for field, sampling in _samplings(config).items():
        sampling.check(field)
        expect(
            config.prompts.max_prompt_tokens + sampling.max_tokens <= longest,
            f"{field}.max_tokens",
            sampling.max_tokens,
            f"with prompts.max_prompt_tokens {config.prompts.max_prompt_tokens} at most generator.max_model_len {longest}",
            "Raise that, or lower one of the others.",
        )


def _samplings(config: "RunConfig") -> dict[str, SamplingConfig]:
    """Every way of sampling that the run uses, by its field."""
    passes = {"sampling": config.sampling, "evaluation.sampling": config.evaluation.sampling, **config.task.samplings()}
    return passes | ({"evaluation.sampled": config.evaluation.sampled} if config.evaluation.sampled.n else {})


def _check_members(config: "RunConfig") -> None:
    """What a mixture's members sample for themselves can be trained on together with the rest."""
    longest, temperature = config.sampling.max_tokens, config.sampling.temperature
    for field, own in config.task.samplings().items():
        limits = {
            "temperature": (
                own.temperature == temperature,
                f"sampling.temperature {temperature}, at which all are scored",
            ),
            "max_tokens": (
                own.max_tokens <= longest,
                f"at most sampling.max_tokens {longest}, by which losses are normalised",
            ),
            "top_p": (own.top_p == 1, "1, as a truncated sampler biases ratios"),
            "top_k": (own.top_k == 0, "0, as a truncated sampler biases ratios"),
        }
        for name, (holds, expected) in limits.items():
            expect(holds, f"{field}.{name}", getattr(own, name), expected, "Correct the value.")


def _check_training(config: "RunConfig") -> None:
    """What is sampled for training can be trained on, and the optimizer's settings are possible."""
    sampling, trainer = config.sampling, config.trainer
    temperature = sampling.temperature
    expect(temperature > 0, "sampling.temperature", temperature, "more than 0 in training", "1.0 is usual.")
    sequence = config.prompts.max_prompt_tokens + sampling.max_tokens
    expect(
        trainer.max_tokens_per_microbatch >= sequence, "trainer.max_tokens_per_microbatch", trainer.max_tokens_per_microbatch,
        f"at least the longest sequence, prompts.max_prompt_tokens + sampling.max_tokens = {sequence}", "Use 8192 or more.",
    )  # fmt: skip
    expect(
        all(0 <= beta < 1 for beta in trainer.optimizer.betas), "trainer.optimizer.betas", trainer.optimizer.betas,
        "two numbers from 0 up to, but not, 1", "Use 0.9 0.95.",
    )  # fmt: skip
    expect(
        not (trainer.compile and ON_CPU), "trainer.compile", True, "False on a CPU, whose attention cannot be compiled",
        "Leave it off without a GPU.",
    )  # fmt: skip
    expect(
        trainer.num_minibatches <= config.num_prompts_per_step,
        "trainer.num_minibatches",
        trainer.num_minibatches,
        f"at most num_prompts_per_step {config.num_prompts_per_step}, as a mini-batch holds whole prompt groups",
        "Lower it, or raise the other.",
    )
