"""Checks a config before a process group starts."""

import math
import os
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any

import torch
from torchtitan.config import Configurable

from torchtitan_rl.algorithm import NoCorrection
from torchtitan_rl.algorithm.losses.objectives import Gdpo
from torchtitan_rl.algorithm.losses.sft import HELD_OUT_LOSS
from torchtitan_rl.data.task import Task
from torchtitan_rl.device import ON_CPU
from torchtitan_rl.environments.vllm_parsers import check_parser_name
from torchtitan_rl.errors import expect
from torchtitan_rl.fields.field_limits import check_fields, check_number, parts
from torchtitan_rl.fields.number import number
from torchtitan_rl.fields.references import correctable, did_you_mean, load_function
from torchtitan_rl.models.hf_decoder import check_other_parts, check_parallelism
from torchtitan_rl.models.mixture_of_experts import check_mixture
from torchtitan_rl.observe.metrics.evaluation_stats import evaluation_names
from torchtitan_rl.observe.select import Selection
from torchtitan_rl.observe.sinks import chosen_sinks
from torchtitan_rl.run.checkpoint_folder import check_form
from torchtitan_rl.run.dump_folder import check_dump_folder
from torchtitan_rl.run.identity import built_by
from torchtitan_rl.run.memory import check_memory, gpu_memory_bytes
from torchtitan_rl.run.teacher_folder import check_asked
from torchtitan_rl.sampling import SamplingConfig

if TYPE_CHECKING:
    from torchtitan_rl.config import RunConfig

_DEGREE: Field = number(1, least=1, remedy="1 turns it off.")
"""The limit of degrees in torchtitan's own config, which declares none."""

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of an attention head that vLLM's CPU kernels support."""


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
    check_fields(config)
    check_dump_folder(config.dump_folder)
    check_form(config.resume)
    if config.comm.init_timeout_seconds is not None:
        check_number(
            number(1800, least=1), config.comm.init_timeout_seconds, "comm.init_timeout_seconds"
        )
    for name in ("pipeline_parallel_degree", "context_parallel_degree"):
        degree = getattr(config.trainer.parallelism, name)
        expect(
            degree == 1,
            f"trainer.parallelism.{name}",
            degree,
            "1, as it is not supported",
            "Use FSDP, HSDP and TP.",
        )
    chosen_sinks(config.metrics.sinks)
    Selection(config.metrics.select)
    for chart in config.metrics.charts:
        title, _, keys = chart.partition("=")
        named = bool(title) and all(keys.split(","))
        expect(
            named,
            "metrics.charts",
            chart,
            "title=metric,metric",
            'Example: "Characters=extra/brevity/characters".',
        )
    _check_whole(config)
    with correctable("algorithm: building its parts raised"):
        config.algorithm.build(max_completion_tokens=config.sampling.max_tokens)
    _check_evaluates(config)
    _check_best(config)
    check_parser_name(config.conversations.tool_call_parser)
    check_layout(config, world_size)
    _check_sampling(config)
    if config.prompts.demonstrate:
        load_function(config.prompts.demonstrate, "prompts.demonstrate")
    _check_samples(config)
    if not os.path.isdir(
        config.hf_assets_path
    ):  # the positions of a folder's model are read later: see check_model
        check_lengths(config)
    _check_training(config)
    _check_weights(config)
    _check_in_flight(config, replicas=world_size // config.generator.tensor_parallel_degree)
    cache = config.algorithm.truncation.cache_tokens
    for sampling in (config.sampling, *config.task.samplings().values()):
        longest = f"at most the longest completion ({sampling.max_tokens} tokens)"
        fits = cache is None or cache <= sampling.max_tokens
        expect(
            fits,
            "algorithm.truncation.cache_tokens",
            cache,
            longest,
            "Lower it or allow longer completions.",
        )
        config.algorithm.build(max_completion_tokens=sampling.max_tokens).validate_sampling(
            sampling.n
        )
    check_asked(config)


def _check_best(config: "RunConfig") -> None:
    """Check that `evaluation.best_by` has the evaluation that it asks for. Its metric: see `check_task`."""
    best_by, stops = config.evaluation.best_by, config.evaluation.stop_after
    asked = "a metric, as evaluation.stop_after asks"
    remedy = f"Use evaluation/accuracy; for demonstrations, -{HELD_OUT_LOSS}."
    expect(bool(best_by or not stops), "evaluation.best_by", "", asked, remedy)
    on = bool(config.evaluation.every) or not best_by
    expect(on, "evaluation.every", 0, "1 or more, as evaluation.best_by asks", "Use 10.")


def _check_whole(config: Any, path: str = "") -> None:
    """Check that no part is silently another one, as its Config builds another class."""
    for declared in fields(config):
        for key, part in parts(getattr(config, declared.name)):
            name = f"{path}.{declared.name}.{key}".strip(".")
            if isinstance(part, Configurable.Config):
                if built_by(part) is type(part):
                    _check_builds(name, type(part))
                _check_whole(part, name)


def _check_builds(field: str, config: type) -> None:
    """Check that a config that is nested in no class has no fields that the class which it silently builds cannot read."""
    bases = config.__mro__
    nested = next((base for base in bases if "_owner" in vars(base)), config)
    has_build = any("build" in vars(base) for base in bases[: bases.index(nested)])
    expected = f"a Config inside the class that it builds, as this one builds {nested.__qualname__.removesuffix('.Config')}"
    added = {one.name for one in fields(config)} - {one.name for one in fields(nested)}
    sound = nested is Configurable.Config or has_build or not added
    expect(sound, field, config.__qualname__, expected, "Move it into your class, as Config.")


def _check_evaluates(config: "RunConfig") -> None:
    """Check that evaluations that are asked for have samples. Those of demonstrations have the held-out loss."""
    passes, asked = (
        config.evaluation.build().passes,
        config.eval_only or config.evaluation.every and config.samples_training,
    )
    why = (
        "with eval_only" if config.eval_only else f"with evaluation.every {config.evaluation.every}"
    )
    remedy = "evaluation.every 0 turns evaluation off."
    expect(
        bool(passes) or not asked,
        "evaluation.sampling.n",
        0,
        f"1 or more, here or in evaluation.sampled, {why}",
        remedy,
    )


def check_task(config: "RunConfig", task: Task) -> None:
    """Check what depends on the built task: the metric of `evaluation.best_by`.

    Raises:
        UserError: as `validate`.
    """
    best_by, known = config.evaluation.best_by, set()
    members = task.members()
    judged = any(getattr(member, "has_answers", True) for member in members.values())
    if not config.samples_training:
        known.add(f"-{HELD_OUT_LOSS}")
    for evaluation_pass, sampling in config.evaluation.build().passes.items():
        names = evaluation_names(sampling.n, judged=judged)
        prefixes = [
            evaluation_pass.prefix,
            *(f"{evaluation_pass.prefix}/{member}" for member in members if member),
        ]
        known |= {f"{prefix}/{each}" for prefix in prefixes for each in names}
        if config.algorithm.loss.build().divergence_beta is not None:
            known.add(f"-{evaluation_pass.prefix}/divergence")
    near = did_you_mean(best_by, known)
    if "pass@" in best_by and not config.evaluation.sampled.n:
        near = "pass@k needs evaluation.sampled.n of at least k, and is then evaluation/sampled/pass@k. "
    remedy = f"{near}The - is for metrics whose lowest value is best; docs/evaluation.md has their meaning."
    either = best_by.removeprefix("-").endswith(("/length", "/length_max", "/clipped_fraction"))
    has_it = not best_by or best_by in known or (either and best_by.removeprefix("-") in known)
    expect(has_it, "evaluation.best_by", best_by, f"one of {sorted(known)}", remedy)


def _check_cpu(config: "RunConfig") -> None:
    """Check what only a CPU limits: the size of a head, and compilation."""
    head_dim = config.model_spec.model.layers[0].attention.head_dim
    expect(
        head_dim in CPU_HEAD_DIMS, "hf_assets_path", config.hf_assets_path,
        f"a model whose head_dim is one of {CPU_HEAD_DIMS}, which vLLM has on a CPU, but it is {head_dim}",
        "Use another model, or a GPU.",
    )  # fmt: skip
    expect(
        not config.trainer.compile, "trainer.compile", True, "False on a CPU, whose attention cannot be compiled",
        "Leave it off without a GPU.",
    )  # fmt: skip


def check_model(config: "RunConfig", *, world_size: int) -> None:
    """Check that degrees, lengths and memory fit the model. It is known from the start's folder or recipe.

    Raises:
        UserError: as `validate`.
    """
    model = config.model_spec.model
    check_parallelism(model, config.trainer.parallelism.tensor_parallel_degree)
    check_other_parts(model, config.trainer, config.generator, on_cpu=ON_CPU)
    check_mixture(model, config.trainer, config.generator, world_size=world_size, on_cpu=ON_CPU)
    attention = model.layers[0].attention
    divided = {
        "attention heads": attention.n_heads,
        "key-value heads": attention.n_kv_heads or attention.n_heads,
        "vocabulary entries": model.vocab_size,
    }
    tp = config.trainer.parallelism.tensor_parallel_degree
    for field, degree in (
        ("trainer.parallelism", tp),
        ("generator", config.generator.tensor_parallel_degree),
    ):
        for what, size in divided.items():
            expect(
                size % degree == 0, f"{field}.tensor_parallel_degree", degree, f"a divisor of the model's {size} {what}",
                "Use another degree.",
            )  # fmt: skip
    check_lengths(config)
    if ON_CPU:
        _check_cpu(config)
    if gpu_bytes := gpu_memory_bytes():
        check_memory(config, world_size=world_size, gpu_bytes=gpu_bytes)


def check_layout(config: "RunConfig", world_size: int) -> None:
    """Check that degrees, ranks and devices fit each other.

    Raises:
        UserError: as `validate`.
    """
    p, local = config.trainer.parallelism, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if gpus := torch.cuda.device_count():
        expect(
            local <= gpus,
            "NGPU",
            local,
            f"at most the {gpus} GPUs of this node",
            "Start that many processes.",
        )
    for name in (
        "tensor_parallel_degree",
        "data_parallel_replicate_degree",
        "expert_parallel_degree",
    ):
        check_number(_DEGREE, getattr(p, name), f"trainer.parallelism.{name}")
    tp, replicate, shard = (
        p.tensor_parallel_degree,
        p.data_parallel_replicate_degree,
        p.data_parallel_shard_degree,
    )
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
    _check_replicas(
        world_size, config.generator.tensor_parallel_degree, config.num_prompts_per_step
    )


def _check_samples(config: "RunConfig") -> None:
    """Check that every sampling config draws samples, and several only if they differ."""
    for field, sampling in _samplings(config).items():
        expect(sampling.n >= 1, f"{field}.n", sampling.n, "at least 1 and at most 65536", "Use 8.")
        expect(
            sampling.n == 1 or sampling.temperature > 0, f"{field}.n", sampling.n,
            "1 with temperature 0, as all samples would be equal", f"Set {field}.temperature, or lower it.",
        )  # fmt: skip
        kept = sampling.temperature == 0 or sampling.temperature >= 0.01
        least = "at least 0.01: vLLM would sample at that, and the trainer would score at another"
        expect(kept, f"{field}.temperature", sampling.temperature, least, "1.0 is usual.")


def _samplings(config: "RunConfig") -> dict[str, SamplingConfig]:
    """All sampling configs that the run uses, by field."""
    passes = {"sampling": config.sampling, **config.task.samplings()}
    of_evaluation = {
        "evaluation.sampling": config.evaluation.sampling,
        "evaluation.sampled": config.evaluation.sampled,
    }
    return passes | {field: sampling for field, sampling in of_evaluation.items() if sampling.n}


def _check_sampling(config: "RunConfig") -> None:
    """Check that the run's sampling config and those of a mixture's members can be trained on together."""
    longest, temperature = config.sampling.max_tokens, config.sampling.temperature
    expect(
        temperature > 0,
        "sampling.temperature",
        temperature,
        "more than 0 in training",
        "1.0 is usual.",
    )
    expect(
        config.samples_training or temperature == 1, "sampling.temperature", temperature,
        "1 with demonstrations, whose likelihood is the policy's own", "evaluation.sampling has its own.",
    )  # fmt: skip
    demonstrated = (
        config.prompts.demonstrate or getattr(config.task, "demonstrations", "none") != "none"
    )
    expect(
        not (config.samples_training and demonstrated), "algorithm.loss", type(config.algorithm.loss).__qualname__,
        "one that learns from prompts.demonstrate or task.demonstrations", "Use Nll.Config(), as --config sft, or unset them.",
    )  # fmt: skip
    replay = "False with sampling.top_p, top_k or min_p: the engine records either its experts or the tokens that it kept"
    expect(
        not (config.truncates and config.generator.router_replay),
        "generator.router_replay",
        True,
        replay,
        "Turn it off.",
    )
    for field, own in {"sampling": config.sampling, **config.task.samplings()}.items():
        limits = {
            "temperature": (own.temperature == temperature, f"sampling.temperature {temperature}, at which all are scored"),
            "max_tokens": (own.max_tokens <= longest, f"at most sampling.max_tokens {longest}, which normalises losses"),
        }  # fmt: skip
        for name, (holds, expected) in limits.items():
            expect(holds, f"{field}.{name}", getattr(own, name), expected, "Correct the value.")


def _check_training(config: "RunConfig") -> None:
    """Check LoRA's settings and the mini-batches of a step."""
    trainer = config.trainer
    adapted = trainer.lora.rank > 0 or trainer.lora == type(trainer.lora)()
    all_weights = "1 or more with trainer.lora.alpha or targets: without it all weights are trained"
    expect(adapted, "trainer.lora.rank", 0, all_weights, "Set it, or leave out the others.")
    if trainer.lora.rank:
        expect(
            bool(trainer.lora.targets),
            "trainer.lora.targets",
            (),
            "at least one",
            "Leave it out for all five.",
        )
        expect(
            ON_CPU or config.generator.dtype == "bfloat16", "generator.dtype", config.generator.dtype,
            "bfloat16 with trainer.lora on a GPU, as vLLM's LoRA kernels have no float32", "Set it.",
        )  # fmt: skip
    expect(
        trainer.num_minibatches <= config.num_prompts_per_step,
        "trainer.num_minibatches",
        trainer.num_minibatches,
        f"at most num_prompts_per_step {config.num_prompts_per_step}, as a mini-batch holds whole prompt groups",
        "Lower it, or raise the other.",
    )


def check_lengths(config: "RunConfig") -> None:
    """Check that prompts, completions and micro-batches fit each other, and the model's positions where `model_spec` is known."""
    prompt, longest = config.prompts.max_prompt_tokens, config.generator.max_model_len
    positions = math.inf if config.model_spec is None else config.model_spec.model.max_seq_len
    expect(
        longest <= positions, "generator.max_model_len", longest, f"at most the model's {positions} positions",
        f"Use --generator.max-model-len {positions}.",
    )  # fmt: skip
    # The turns of a rollout may be in several traces. Then only a turn must fit.
    turn = config.conversations.max_turn_tokens or math.inf
    for field, sampling in _samplings(config).items():
        sequence = prompt + min(sampling.max_tokens, turn)
        remedy = f"Use --generator.max-model-len {sequence}."
        if sequence > positions:
            remedy = "Lower one of them."
        expect(
            sequence <= longest, f"{field}.max_tokens", sampling.max_tokens,
            f"with prompts.max_prompt_tokens {prompt} at most generator.max_model_len {longest}", remedy,
        )  # fmt: skip
    sequence = prompt + min(config.sampling.max_tokens, turn)
    packed = config.trainer.max_tokens_per_microbatch
    expect(
        packed >= sequence, "trainer.max_tokens_per_microbatch", packed,
        f"at least {sequence}, the longest sequence (prompts.max_prompt_tokens + sampling.max_tokens)", f"Use {sequence}.",
    )  # fmt: skip


def _check_weights(config: "RunConfig") -> None:
    """Check that the advantages of single rewards are added up with the weights of the rewards."""
    if isinstance(config.algorithm.advantage, Gdpo.Config):
        weights, summed = config.algorithm.advantage.weights, config.grader.weights
        expect(
            weights == summed,
            "algorithm.advantage.weights",
            weights,
            f"{summed}, as grader.weights",
            "Set both.",
        )


def _check_in_flight(config: "RunConfig", *, replicas: int) -> None:
    """Check that groups can be carried from step to step: how many, in equal shares, and with what else."""
    prompts, needed, algorithm = (
        config.in_flight.prompts,
        config.num_prompts_per_step,
        config.algorithm,
    )
    if not prompts:
        return
    expect(
        config.samples_training,
        "in_flight.prompts",
        prompts,
        "0 with demonstrations: nothing is sampled",
        "Set 0.",
    )
    expect(
        needed <= prompts <= 2 * needed, "in_flight.prompts", prompts,
        f"0, or num_prompts_per_step {needed} to twice as many, so that no group gets older than max_age", "Use 1.5 times.",
    )  # fmt: skip
    for field, count in {"in_flight.prompts": prompts, "num_prompts_per_step": needed}.items():
        share = f"a multiple of the {replicas} generator replicas with in_flight.prompts, so that each has the same share"
        expect(count % replicas == 0, field, count, share, "Change it.")
    alone = "with in_flight.prompts"
    expect(
        algorithm.zero_variance != "refill", "algorithm.zero_variance", "refill", f'"keep" or "drop" {alone}',
        "Groups in flight are a supply of new prompts already.",
    )  # fmt: skip
    corrected = algorithm.old_logprobs == "sampler" or not isinstance(
        algorithm.mismatch, NoCorrection.Config
    )
    expect(
        corrected, "algorithm.mismatch", "none", f"a correction {alone}, for tokens of older weights",
        'Use TokenTruncate.Config() (--algorithm.old-logprobs sampler: the ratio contains it).',
    )  # fmt: skip
    for field, sampling in {"sampling": config.sampling, **config.task.samplings()}.items():
        remedy = "Use stop_token_ids."
        expect(
            not sampling.stop,
            f"{field}.stop",
            sampling.stop,
            f"none {alone}: a text may span two steps",
            remedy,
        )


def _check_replicas(world_size: int, degree: int, num_prompts: int) -> None:
    """Check that replicas divide the ranks and that each has a prompt.

    Raises:
        UserError: naming the field, the values and the remedy.
    """
    expect(
        degree >= 1 and world_size % degree == 0, "generator.tensor_parallel_degree", degree,
        f"a divisor of the {world_size} ranks", "Change it, or NGPU.",
    )  # fmt: skip
    replicas = world_size // degree
    expect(
        num_prompts >= replicas, "num_prompts_per_step", num_prompts,
        f"at least {replicas}, one for each generator replica ({world_size} ranks / generator.tensor_parallel_degree {degree})",
        "Raise it, or start fewer ranks (NGPU).",
    )  # fmt: skip
