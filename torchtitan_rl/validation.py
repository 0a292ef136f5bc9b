"""Checks what combines several classes of a config, before a process group starts.

A field's own limits stand at the field (fields/field_limits.py). Config functions assign fields one by one, and a `__post_init__` would
see none of it, so combinations of fields are here too.
"""

import math
import os
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from torchtitan.config import Configurable

from torchtitan_rl.algorithm import Algorithm, Gdpo, NoCorrection
from torchtitan_rl.algorithm.losses.sft import HELD_OUT_LOSS
from torchtitan_rl.data.task import Task
from torchtitan_rl.device import ON_CPU
from torchtitan_rl.environments.vllm_parsers import check_parser_name
from torchtitan_rl.errors import expect
from torchtitan_rl.fields.field_limits import check_fields, parts
from torchtitan_rl.fields.references import correctable, did_you_mean, load_function
from torchtitan_rl.models.hf_decoder import check_other_parts, check_parallelism
from torchtitan_rl.models.mixture_of_experts import check_mixture
from torchtitan_rl.observe.metrics.evaluation_stats import evaluation_names
from torchtitan_rl.observe.select import Selection
from torchtitan_rl.observe.sinks import chosen_sinks
from torchtitan_rl.run.checkpoint_folder import check_form
from torchtitan_rl.run.dump_folder import check_dump_folder
from torchtitan_rl.run.identity import built_by
from torchtitan_rl.run.teacher_folder import check_asked
from torchtitan_rl.sampling import SamplingConfig

if TYPE_CHECKING:
    from torchtitan_rl.config import RunConfig

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of an attention head that vLLM's CPU kernels support."""


def validate(config: "RunConfig", *, world_size: int) -> Algorithm:
    """Check values and combinations. Returns the objective, which is built for it.

    Raises:
        UserError: naming the field, the value, what was expected and the remedy.
    """
    example = "one, for example task=SumDigits.Config()"
    expect(config.task is not None, "task", None, example, "The config function must set it.")
    check_fields(config)
    check_dump_folder(config.dump_folder)
    check_form(config.resume)
    _check_metrics(config)
    _check_builds(config)
    with correctable("algorithm: building its parts raised"):
        algorithm = config.algorithm.build(max_completion_tokens=config.sampling.max_tokens)
    samples_training = algorithm.policy_loss.from_engine
    _check_evaluation(config, samples_training)
    check_parser_name(config.conversations.tool_call_parser)
    _check_layout(config, world_size)
    _check_training_sampling(config)
    _check_demonstrations(config, samples_training)
    _check_samplings(config)
    if not os.path.isdir(config.hf_assets_path):  # else `check_model` knows the model's positions
        check_lengths(config)
    _check_lora(config)
    _check_minibatches(config)
    _check_reward_weights(config)
    if config.in_flight.prompts:
        expected = "0 with demonstrations: nothing is sampled"
        expect(samples_training, "in_flight.prompts", config.in_flight.prompts, expected, "Set 0.")
        _check_in_flight(config, world_size // config.generator.tensor_parallel_degree)
    _check_objective(config, algorithm)
    check_asked(config, algorithm.policy_loss)
    return algorithm


def _check_metrics(config: "RunConfig") -> None:
    chosen_sinks(config.metrics.sinks)
    Selection(config.metrics.select)
    for chart in config.metrics.charts:
        title, _, keys = chart.partition("=")
        named = bool(title) and all(keys.split(","))
        example = 'Example: "Characters=extra/brevity/characters".'
        expect(named, "metrics.charts", chart, "title=metric,metric", example)


def _check_builds(config: Any, path: str = "") -> None:
    """Check that no part is silently another one: a Config that is nested in no class builds its parent's class."""
    for declared in fields(config):
        for key, part in parts(getattr(config, declared.name)):
            if not isinstance(part, Configurable.Config):
                continue
            name = f"{path}.{declared.name}.{key}".strip(".")
            _check_builds(part, name)
            if built_by(part) is not type(part):
                continue
            bases = type(part).__mro__
            nested = next((base for base in bases if "_owner" in vars(base)), type(part))
            has_build = any("build" in vars(base) for base in bases[: bases.index(nested)])
            sound = (
                nested is Configurable.Config
                or has_build
                or len(fields(part)) == len(fields(nested))
            )
            built = nested.__qualname__.removesuffix(".Config")
            expected = f"a Config inside the class that it builds, as this one builds {built}"
            remedy = "Move it into your class, as Config."
            expect(sound, name, type(part).__qualname__, expected, remedy)


def _check_evaluation(config: "RunConfig", samples_training: bool) -> None:
    """Check that evaluations that are asked for have samples, and the best metric its evaluation."""
    evaluation = config.evaluation
    wanted = f"with evaluation.every {evaluation.every}"
    if config.eval_only:
        wanted = "with eval_only"
    samples = config.eval_only or (evaluation.every and samples_training)
    expected = f"1 or more, here or in evaluation.sampled, {wanted}"
    remedy = "evaluation.every 0 turns evaluation off."
    has_samples = bool(evaluation.build().passes) or not samples
    expect(has_samples, "evaluation.sampling.n", 0, expected, remedy)
    chosen = bool(evaluation.best_by or not evaluation.stop_after)
    remedy = f"Use evaluation/accuracy; for demonstrations, -{HELD_OUT_LOSS}."
    expected = "a metric, as evaluation.stop_after asks"
    expect(chosen, "evaluation.best_by", "", expected, remedy)
    evaluates = bool(evaluation.every or not evaluation.best_by)
    expected = "1 or more, as evaluation.best_by asks"
    expect(evaluates, "evaluation.every", 0, expected, "Use 10.")


def check_task(config: "RunConfig", algorithm: Algorithm, task: Task) -> None:
    """Check what depends on the built task: the metric of `evaluation.best_by`.

    Raises:
        UserError: as `validate`.
    """
    best_by, known = config.evaluation.best_by, set()
    members = task.members()
    judged = any(getattr(member, "has_answers", True) for member in members.values())
    if not algorithm.policy_loss.from_engine:
        known.add(f"-{HELD_OUT_LOSS}")
    for evaluation_pass, sampling in config.evaluation.build().passes.items():
        prefix = evaluation_pass.prefix
        prefixes = [prefix, *(f"{prefix}/{member}" for member in members if member)]
        names = evaluation_names(sampling.n, judged=judged)
        known |= {f"{each}/{name}" for each in prefixes for name in names}
        if algorithm.policy_loss.divergence_beta is not None:
            known.add(f"-{prefix}/divergence")
    near = did_you_mean(best_by, known)
    if "pass@" in best_by and not config.evaluation.sampled.n:
        near = "pass@k needs evaluation.sampled.n of at least k, and is then evaluation/sampled/pass@k. "
    remedy = f"{near}The - is for metrics whose lowest value is best; docs/evaluation.md has their meaning."
    either = best_by.removeprefix("-").endswith(("/length", "/length_max", "/clipped_fraction"))
    has_it = not best_by or best_by in known or (either and best_by.removeprefix("-") in known)
    expect(has_it, "evaluation.best_by", best_by, f"one of {sorted(known)}", remedy)


def check_model(config: "RunConfig", *, world_size: int) -> None:
    """Check that degrees and lengths fit the model. It is known from the start's folder or recipe.

    Raises:
        UserError: as `validate`.
    """
    model, tp = config.model_spec.model, config.trainer.parallelism.tensor_parallel_degree
    check_parallelism(model, tp)
    check_other_parts(model, config.trainer, config.generator, on_cpu=ON_CPU)
    check_mixture(model, config.trainer, config.generator, world_size=world_size, on_cpu=ON_CPU)
    attention = model.layers[0].attention
    divided = {
        "attention heads": attention.n_heads,
        "key-value heads": attention.n_kv_heads or attention.n_heads,
        "vocabulary entries": model.vocab_size,
    }
    degrees = {"trainer.parallelism": tp, "generator": config.generator.tensor_parallel_degree}
    for part, degree in degrees.items():
        for what, size in divided.items():
            field, expected = (
                f"{part}.tensor_parallel_degree",
                f"a divisor of the model's {size} {what}",
            )
            expect(size % degree == 0, field, degree, expected, "Use another degree.")
    check_lengths(config)
    if ON_CPU:
        _check_cpu(config, attention.head_dim)


def _check_cpu(config: "RunConfig", head_dim: int) -> None:
    """Check what only a CPU limits: the size of a head, and compilation."""
    expected = f"a model whose head_dim is one of {CPU_HEAD_DIMS}, which vLLM has on a CPU, but it is {head_dim}"
    supported = head_dim in CPU_HEAD_DIMS
    remedy = "Use another model, or a GPU."
    expect(supported, "hf_assets_path", config.hf_assets_path, expected, remedy)
    expected = "False on a CPU, whose attention cannot be compiled"
    remedy = "Leave it off without a GPU."
    expect(not config.trainer.compile, "trainer.compile", True, expected, remedy)


def _check_layout(config: "RunConfig", world_size: int) -> None:
    """Check that degrees, ranks and prompts fit each other."""
    p = config.trainer.parallelism
    seconds = config.comm.init_timeout_seconds
    positive = seconds is None or seconds >= 1
    expect(positive, "comm.init_timeout_seconds", seconds, "at least 1", "Use 1800.")
    for name in ("pipeline_parallel_degree", "context_parallel_degree"):
        degree, field = getattr(p, name), f"trainer.parallelism.{name}"
        expect(degree == 1, field, degree, "1, as it is not supported", "Use FSDP, HSDP and TP.")
    for kind in ("tensor_parallel", "data_parallel_replicate", "expert_parallel"):
        degree, field = getattr(p, f"{kind}_degree"), f"trainer.parallelism.{kind}_degree"
        expect(degree >= 1, field, degree, "at least 1", "1 turns it off.")
    tp, replicate, shard = (
        p.tensor_parallel_degree,
        p.data_parallel_replicate_degree,
        p.data_parallel_shard_degree,
    )
    field, remedy = (
        "trainer.parallelism.data_parallel_shard_degree",
        "-1 takes the ranks that are left over.",
    )
    expect(shard == -1 or shard >= 1, field, shard, "-1 or at least 1", remedy)
    fixed = tp * replicate * max(shard, 1)
    ranks = f"{fixed}"
    if shard < 0:
        ranks = f"a multiple of {fixed}"
    expect(
        world_size == fixed or (shard < 0 and world_size % fixed == 0),
        "world size (NGPU x NNODES)",
        world_size,
        f"{ranks}, for trainer.parallelism has tensor_parallel_degree {tp} x data_parallel_replicate_degree {replicate} x "
        f"data_parallel_shard_degree {shard}",
        "Start as many ranks, or change the degrees.",
    )
    degree, prompts = config.generator.tensor_parallel_degree, config.num_prompts_per_step
    field, expected = "generator.tensor_parallel_degree", f"a divisor of the {world_size} ranks"
    expect(world_size % degree == 0, field, degree, expected, "Change it, or NGPU.")
    replicas = world_size // degree
    expected = f"at least {replicas}, one for each generator replica ({world_size} ranks / {field} {degree})"
    remedy = "Raise it, or start fewer ranks (NGPU)."
    expect(prompts >= replicas, "num_prompts_per_step", prompts, expected, remedy)


def _samplings(config: "RunConfig") -> dict[str, SamplingConfig]:
    """All sampling configs that the run uses, by field."""
    samplings = {"sampling": config.sampling, **config.task.samplings()}
    for name in ("sampling", "sampled"):
        sampling = getattr(config.evaluation, name)
        if sampling.n:
            samplings[f"evaluation.{name}"] = sampling
    return samplings


def _check_samplings(config: "RunConfig") -> None:
    """Check that every sampling config draws samples, and several only if they differ."""
    for field, sampling in _samplings(config).items():
        n, temperature = sampling.n, sampling.temperature
        expect(n >= 1, f"{field}.n", n, "at least 1 and at most 65536", "Use 8.")
        expected = "1 with temperature 0, as all samples would be equal"
        remedy = f"Set {field}.temperature, or lower it."
        expect(n == 1 or temperature > 0, f"{field}.n", n, expected, remedy)
        expected = (
            "at least 0.01: vLLM would sample at that, and the trainer would score at another"
        )
        kept = temperature == 0 or temperature >= 0.01
        expect(kept, f"{field}.temperature", temperature, expected, "1.0 is usual.")


def _check_training_sampling(config: "RunConfig") -> None:
    """Check that the run's sampling config and those of a mixture's members can be trained on together."""
    longest, temperature = config.sampling.max_tokens, config.sampling.temperature
    field, expected = "sampling.temperature", "more than 0 in training"
    expect(temperature > 0, field, temperature, expected, "1.0 is usual.")
    replay = "False with sampling.top_p, top_k or min_p: the engine records either its experts or the tokens that it kept"
    both = config.truncates and config.generator.router_replay
    expect(not both, "generator.router_replay", True, replay, "Turn it off.")
    for field, own in config.task.samplings().items():
        expected = f"sampling.temperature {temperature}, at which all are scored"
        same = own.temperature == temperature
        expect(same, f"{field}.temperature", own.temperature, expected, "Correct the value.")
        expected = f"at most sampling.max_tokens {longest}, which normalises losses"
        shorter = own.max_tokens <= longest
        expect(shorter, f"{field}.max_tokens", own.max_tokens, expected, "Correct the value.")


def _check_demonstrations(config: "RunConfig", samples_training: bool) -> None:
    """Check that demonstrations and a loss that learns from them come together, at temperature 1."""
    if config.prompts.demonstrate:
        load_function(config.prompts.demonstrate, "prompts.demonstrate")
    if not samples_training:
        temperature = config.sampling.temperature
        expected = "1 with demonstrations, whose likelihood is the policy's own"
        remedy = "evaluation.sampling has its own."
        expect(temperature == 1, "sampling.temperature", temperature, expected, remedy)
        return
    shown = config.prompts.demonstrate or getattr(config.task, "demonstrations", "none") != "none"
    loss = type(config.algorithm.loss).__qualname__
    expected = "one that learns from prompts.demonstrate or task.demonstrations"
    expect(
        not shown,
        "algorithm.loss",
        loss,
        expected,
        "Use Nll.Config(), as --config sft, or unset them.",
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


def _check_lora(config: "RunConfig") -> None:
    lora = config.trainer.lora
    if lora.rank == 0:
        expected = (
            "1 or more with trainer.lora.alpha or targets: without it all weights are trained"
        )
        remedy = "Set it, or leave out the others."
        expect(lora == type(lora)(), "trainer.lora.rank", 0, expected, remedy)
        return
    remedy = "Leave it out for all five."
    expect(bool(lora.targets), "trainer.lora.targets", (), "at least one", remedy)
    dtype = config.generator.dtype
    expected = "bfloat16 with trainer.lora on a GPU, as vLLM's LoRA kernels have no float32"
    expect(ON_CPU or dtype == "bfloat16", "generator.dtype", dtype, expected, "Set it.")


def _check_minibatches(config: "RunConfig") -> None:
    count, prompts = config.trainer.num_minibatches, config.num_prompts_per_step
    expected = f"at most num_prompts_per_step {prompts}, as a mini-batch holds whole prompt groups"
    remedy = "Lower it, or raise the other."
    expect(count <= prompts, "trainer.num_minibatches", count, expected, remedy)


def _check_reward_weights(config: "RunConfig") -> None:
    """Check that the advantages of single rewards are added up with the weights of the rewards."""
    advantage, summed = config.algorithm.advantage, config.grader.weights
    if isinstance(advantage, Gdpo.Config):
        same, expected = advantage.weights == summed, f"{summed}, as grader.weights"
        expect(same, "algorithm.advantage.weights", advantage.weights, expected, "Set both.")


def _check_in_flight(config: "RunConfig", replicas: int) -> None:
    """Check that groups can be carried from step to step: how many, in equal shares, and with what else."""
    field, alone = "in_flight.prompts", "with in_flight.prompts"
    prompts, needed, algorithm = (
        config.in_flight.prompts,
        config.num_prompts_per_step,
        config.algorithm,
    )
    expected = f"0, or num_prompts_per_step {needed} to twice as many, so that no group gets older than max_age"
    expect(needed <= prompts <= 2 * needed, field, prompts, expected, "Use 1.5 times.")
    for name, count in {field: prompts, "num_prompts_per_step": needed}.items():
        expected = f"a multiple of the {replicas} generator replicas {alone}, so that each has the same share"
        expect(count % replicas == 0, name, count, expected, "Change it.")
    refills, expected = algorithm.zero_variance == "refill", f'"keep" or "drop" {alone}'
    remedy = "Groups in flight are a supply of new prompts already."
    expect(not refills, "algorithm.zero_variance", "refill", expected, remedy)
    corrects = not isinstance(algorithm.mismatch, NoCorrection.Config)
    expected = f"a correction {alone}, for tokens of older weights"
    remedy = "Use TokenTruncate.Config() (--algorithm.old-logprobs sampler: the ratio contains it)."
    corrected = corrects or algorithm.old_logprobs == "sampler"
    expect(corrected, "algorithm.mismatch", "none", expected, remedy)
    for name, sampling in {"sampling": config.sampling, **config.task.samplings()}.items():
        expected = f"none {alone}: a text may span two steps"
        expect(not sampling.stop, f"{name}.stop", sampling.stop, expected, "Use stop_token_ids.")


def _check_objective(config: "RunConfig", algorithm: Algorithm) -> None:
    """Check that the objective works with the groups and lengths that are sampled."""
    cache, field = config.algorithm.truncation.cache_tokens, "algorithm.truncation.cache_tokens"
    for sampling in (config.sampling, *config.task.samplings().values()):
        expected = f"at most the longest completion ({sampling.max_tokens} tokens)"
        fits = cache is None or cache <= sampling.max_tokens
        expect(fits, field, cache, expected, "Lower it or allow longer completions.")
        algorithm.validate_sampling(sampling.n)
