"""Checks what combines several classes of a config, before a process group starts.

`validate` runs before anything heavy is imported, so functions import what they need of torchtitan's models.

A field's own limits stand at the field (fields/field_limits.py). Config functions assign fields one by one, and a `__post_init__` would
see none of it, so combinations of fields are here too.
"""

import math
import os
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from torchtitan.config import Configurable

from torchtitan_rl.algorithm import Algorithm, Gdpo, NoCorrection
from torchtitan_rl.algorithm.losses.loss import Loss
from torchtitan_rl.device import FOR_CPU
from torchtitan_rl.errors import expect
from torchtitan_rl.fields.field_limits import check_fields, parts
from torchtitan_rl.fields.references import correctable, did_you_mean, load_function
from torchtitan_rl.observe.filters import sink_filters
from torchtitan_rl.observe.select import Selection
from torchtitan_rl.observe.sinks import chosen_sinks
from torchtitan_rl.run.checkpoint_folder import check_form
from torchtitan_rl.run.dump_folder import check_dump_folder
from torchtitan_rl.run.identity import built_by
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.trainer.optimizer import AdamW
from torchtitan_rl.trainer.trainer_config import TrainerConfig

if TYPE_CHECKING:
    from torchtitan_rl.config import RunConfig


def validate(config: "RunConfig", *, world_size: int) -> Algorithm:
    """Check values and combinations. Returns the objective, which is built for it.

    Raises UserError, naming the field, the value, what was expected and the remedy.
    """
    example = "one, for example task=SumDigits.Config()"
    expect(config.task is not None, "task", None, example, "The config function must set it.")
    check_fields(config)
    check_dump_folder(config.dump_folder)
    _check_own_ranks(config, world_size)
    check_form(config.resume)
    sink_filters(config.metrics.filters, chosen_sinks(config.metrics.sinks))
    Selection(config.metrics.select)
    _check_builds(config)
    with correctable("algorithm: building its parts raised"):
        algorithm = config.algorithm.build(max_completion_tokens=config.sampling.max_tokens)
    samples_training = algorithm.policy_loss.from_engine
    expected, own = "0 with demonstrations: nothing is sampled", config.generator.ranks
    for field, count in {
        "generator.ranks": own,
        "in_flight.prompts": config.in_flight.prompts,
    }.items():
        expect(samples_training or not count, field, count, expected, "Set 0.")
    _check_evaluation(config, samples_training)
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
        _check_in_flight(config, (own or world_size) // config.generator.tensor_parallel_degree)
    _check_objective(config, algorithm)
    check_teacher(config, algorithm.policy_loss)
    return algorithm


def _check_builds(config: Any, path: str = "") -> None:
    """Check that no part is silently another one: a Config that is nested in no class builds its parent's class."""
    for declared in fields(config):
        for key, part in parts(getattr(config, declared.name)):
            if not isinstance(part, Configurable.Config):
                continue
            name = f"{path}.{declared.name}.{key}".strip(".")
            _check_builds(part, name)
            owner = type(part)._owner
            if owner is None:
                continue
            builds_itself = type(part).build is not owner.Config.build
            has_no_own = len(fields(part)) == len(fields(owner.Config))
            sound = built_by(part) is owner or builds_itself or has_no_own
            builds = f"as this one builds {owner.__qualname__}"
            expected = f"a Config inside the class that it builds, {builds}"
            remedy = "Move it into your class, as Config."
            expect(sound, name, type(part).__qualname__, expected, remedy)


def _check_evaluation(config: "RunConfig", samples_training: bool) -> None:
    """Check that evaluations that are asked for have samples, and the best metric its evaluation."""
    evaluation = config.evaluation
    samples = config.eval_only or (evaluation.every and samples_training)
    has_samples = bool(evaluation.build().passes) or not samples
    expected = "1 or more, here or in evaluation.sampled, for evaluation.every or eval_only"
    remedy = "evaluation.every 0 turns evaluation off."
    expect(has_samples, "evaluation.sampling.n", 0, expected, remedy)
    chosen = bool(evaluation.best_by or not evaluation.stop_after)
    expected = "a metric, as evaluation.stop_after asks"
    expect(chosen, "evaluation.best_by", "", expected, "Use evaluation/accuracy.")
    name = evaluation.best_by.removeprefix("-")
    expected = (
        "a metric evaluation/..., and evaluation.sampled.n above 0 for evaluation/sampled/..."
    )
    known = evaluation.build().metric_names
    prefix = "evaluation/sampled" if name.startswith("evaluation/sampled/") else "evaluation"
    is_known = f"{prefix}/{name.rpartition('/')[2]}" in known  # between them, a task's member
    exists = not name or (name.startswith("evaluation/") and is_known)
    remedy = did_you_mean(name, known) or "Use evaluation/accuracy."
    expect(exists, "evaluation.best_by", name, expected, remedy)
    evaluates = bool(evaluation.every or not evaluation.best_by)
    expected = "1 or more, as evaluation.best_by asks"
    expect(evaluates, "evaluation.every", 0, expected, "Use 10.")


def check_model(config: "RunConfig", *, world_size: int) -> None:
    """Check that degrees and lengths fit the model. It is known from the start's folder or recipe.

    Raises UserError as `validate`.
    """
    from torchtitan_rl.models.hf_decoder import check_other_parts
    from torchtitan_rl.models.mixture_of_experts import check_mixture

    model, tp = config.model_spec.model, config.trainer.parallelism.tensor_parallel_degree
    check_other_parts(model, config.trainer, config.generator, on_cpu=FOR_CPU)
    check_mixture(model, config.trainer, config.generator, world_size=world_size, on_cpu=FOR_CPU)
    attention = model.layers[0].attention
    sizes = (attention.n_heads, attention.n_kv_heads or attention.n_heads, model.vocab_size)
    degrees = {"trainer.parallelism": tp, "generator": config.generator.tensor_parallel_degree}
    for part, degree in degrees.items():
        heads, keys, words = sizes
        if part == "generator" and degree % keys == 0:
            keys = degree  # each of an engine's ranks has a copy of one
        divides = not any(size % degree for size in (heads, keys, words))
        expected = "a divisor of the model's heads, key-value heads and vocabulary, {}, {} and {}"
        field, remedy = f"{part}.tensor_parallel_degree", "Use another degree."
        expect(divides, field, degree, expected.format(*sizes), remedy)
    check_lengths(config)
    compiles = not (FOR_CPU and config.trainer.compile)
    expected = "False on a CPU, whose attention cannot be compiled"
    expect(compiles, "trainer.compile", True, expected, "Leave it off without a GPU.")
    has_backward = not (FOR_CPU and config.trainer.attention == "flex")
    expected = '"auto" on a CPU, where FlexAttention has no backward'
    expect(has_backward, "trainer.attention", "flex", expected, "Leave it out without a GPU.")
    optimizer = config.trainer.optimizer
    known = optimizer.on_host is not True or type(optimizer) is AdamW.Config
    expected = 'False or "auto" with an optimizer of your own, whose state stays where it puts it'
    expect(known, "trainer.optimizer.on_host", True, expected, "Leave it out.")


def _check_own_ranks(config: "RunConfig", world_size: int) -> None:
    """Check that the ranks that only sample leave some that train, and what only they can have."""
    ranks, ahead = config.generator.ranks, config.generator.ahead
    expected = f"fewer than the {world_size} ranks (NGPU x NNODES), so that some train"
    expect(ranks < world_size, "generator.ranks", ranks, expected, "Lower it, or start more.")
    expected = "0 without generator.ranks, whose engines sample beside the update"
    expect(ranks > 0 or not ahead, "generator.ahead", ahead, expected, "Set generator.ranks too.")
    expected = "False with generator.ranks: the records would be of other ranks"
    replays = bool(ranks and config.generator.router_replay)
    expect(not replays, "generator.router_replay", True, expected, "Turn it off.")
    expected = 'False or "auto" with generator.ranks: nothing else needs their memory'
    sleeps = ranks > 0 and config.generator.sleep is True
    expect(not sleeps, "generator.sleep", True, expected, "Leave it out.")
    if ahead:
        _check_corrected(config, "with generator.ahead")


def _check_corrected(config: "RunConfig", alone: str) -> None:
    """Check that tokens which older weights sampled are corrected for."""
    algorithm = config.algorithm
    corrects = not isinstance(algorithm.mismatch, NoCorrection.Config)
    corrected = corrects or algorithm.old_logprobs == "sampler"
    expected = f"a correction {alone}, for tokens of older weights"
    remedy = "Use TokenTruncate.Config() (--algorithm.old-logprobs sampler: the ratio contains it)."
    expect(corrected, "algorithm.mismatch", "none", expected, remedy)


def _check_layout(config: "RunConfig", world_size: int) -> None:
    """Check that degrees, ranks and prompts fit each other."""
    p, own = config.trainer.parallelism, config.generator.ranks
    trainers, samplers = world_size - own, own or world_size
    for name in ("pipeline_parallel_degree", "context_parallel_degree"):
        degree, field = getattr(p, name), f"trainer.parallelism.{name}"
        expect(degree == 1, field, degree, "1, as it is not supported", "Use FSDP, HSDP and TP.")
    degrees = (
        f"tensor_parallel_degree {p.tensor_parallel_degree} x data_parallel_replicate_degree {p.data_parallel_replicate_degree} x "
        f"data_parallel_shard_degree {p.data_parallel_shard_degree} (-1: the ranks that are left)"
    )
    ranks = "NGPU x NNODES - generator.ranks" if own else "NGPU x NNODES"
    where = f"trainer.parallelism on {trainers} ranks ({ranks})"
    if p != TrainerConfig().parallelism:  # the default fits any number of ranks
        from torchtitan.distributed import ParallelDims  # a second

        with correctable(f"{where}: {degrees} do not fit them:"):
            ParallelDims.from_config(p, trainers)
    degree, prompts = config.generator.tensor_parallel_degree, config.num_prompts_per_step
    field, which = "generator.tensor_parallel_degree", " that sample" if own else ""
    expected = f"a divisor of the {samplers} ranks{which}"
    expect(samplers % degree == 0, field, degree, expected, "Change it, or the ranks.")
    replicas = samplers // degree
    divided = f"{samplers} ranks / {field} {degree}"
    expected = f"at least {replicas}, one for each generator replica ({divided})"
    remedy = "Raise it, or start fewer ranks (NGPU)."
    expect(prompts >= replicas, "num_prompts_per_step", prompts, expected, remedy)


def _samplings(config: "RunConfig") -> dict[str, SamplingConfig]:
    """All sampling configs that the run uses, by field."""
    samplings = {"sampling": config.sampling, **config.task.samplings()}
    evaluation = config.evaluation.like(config.sampling)
    for name in ("sampling", "sampled"):
        sampling = getattr(evaluation, name)
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
        expected = "at least 0.01: vLLM would sample at that, the trainer would score at another"
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
    remedy = "Use Nll.Config(), as --config sft, or unset them."
    expect(not shown, "algorithm.loss", loss, expected, remedy)


def longest_sequence(config: "RunConfig") -> int:
    """Returns generator.max_model_len, or for "auto" the longest prompt and the longest completion together, in tokens."""
    if config.generator.max_model_len != "auto":
        return config.generator.max_model_len
    completions = [sampling.max_tokens for sampling in _samplings(config).values()]
    return config.prompts.max_prompt_tokens + max(completions)


def check_lengths(config: "RunConfig") -> None:
    """Check that prompts, completions and micro-batches fit each other, and the model's positions where `model_spec` is known."""
    prompt, longest = config.prompts.max_prompt_tokens, longest_sequence(config)
    positions = math.inf if config.model_spec is None else config.model_spec.model.max_seq_len
    samplings = _samplings(config)
    completion = max(sampling.max_tokens for sampling in samplings.values())
    remedy = f"Use --generator.max-model-len {positions}."
    if longest == prompt + completion:
        remedy = f"It has room for prompts.max_prompt_tokens {prompt} and max_tokens {completion}: lower one of them."
    expected = f"at most the model's {positions} positions"
    expect(longest <= positions, "generator.max_model_len", longest, expected, remedy)
    # The turns of a rollout may be in several traces. Then only a turn must fit.
    turn = config.conversations.max_turn_tokens or math.inf
    room = max(longest - prompt, longest // 2)
    longer = [field for field, sampling in samplings.items() if sampling.max_tokens > room]
    shorter = [f"{field}.max_tokens {room}" for field in longer]
    if prompt > longest - room:
        shorter.append(f"prompts.max_prompt_tokens {longest - room}")
    kept = " ".join(f"--{setting.replace('_', '-')}" for setting in shorter)
    for field, sampling in samplings.items():
        sequence = prompt + min(sampling.max_tokens, turn)
        expect(
            sequence <= longest, f"{field}.max_tokens", sampling.max_tokens,
            f"with prompts.max_prompt_tokens {prompt} at most generator.max_model_len {longest}",
            f"To keep that, use {kept}; otherwise --generator.max-model-len auto, which is {sequence}.",
        )  # fmt: skip
    sequence = prompt + min(config.sampling.max_tokens, turn)
    packed = config.trainer.max_tokens_per_microbatch
    expected = f"at least {sequence}, the longest sequence (prompts.max_prompt_tokens + sampling.max_tokens)"
    remedy = f"Use {sequence}."
    expect(packed >= sequence, "trainer.max_tokens_per_microbatch", packed, expected, remedy)


def _check_lora(config: "RunConfig") -> None:
    lora = config.trainer.lora
    if lora.rank == 0:
        expected = "1 or more with trainer.lora.alpha or targets: else all weights are trained"
        remedy = "Set it, or leave out the others."
        expect(lora == type(lora)(), "trainer.lora.rank", 0, expected, remedy)
        return
    dtype = config.generator.dtype
    expected = "bfloat16 with trainer.lora on a GPU, as vLLM's LoRA kernels have no float32"
    expect(FOR_CPU or dtype == "bfloat16", "generator.dtype", dtype, expected, "Set it.")


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
    prompts, needed = config.in_flight.prompts, config.num_prompts_per_step
    algorithm = config.algorithm
    expected = f"0, or num_prompts_per_step {needed} to twice as many, so that no group gets older than max_age"
    expect(needed <= prompts <= 2 * needed, field, prompts, expected, "Use 1.5 times.")
    for name, count in {field: prompts, "num_prompts_per_step": needed}.items():
        expected = f"a multiple of the {replicas} generator replicas {alone}, so that each has the same share"
        expect(count % replicas == 0, name, count, expected, "Change it.")
    refills, expected = algorithm.zero_variance == "refill", f'"keep" or "drop" {alone}'
    remedy = "Groups in flight are a supply of new prompts already."
    expect(not refills, "algorithm.zero_variance", "refill", expected, remedy)
    _check_corrected(config, alone)
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


def check_teacher(config: "RunConfig", loss: Loss) -> None:
    """Check that a run has a teacher if and only if its loss learns from one, and that the engine's records, which are of the policy's
    prompt, are not asked of another prompt. Raises UserError, naming the field."""
    name, named = type(loss).__qualname__, config.teacher or config.teacher_hint
    if not loss.needs_teacher:
        expected = f"none, as the loss {name} learns from no teacher"
        remedy = "Use the loss Distill or ExactDistill, or leave it out."
        for field in ("teacher", "teacher_hint", "more_teachers"):
            value = getattr(config, field)
            expect(not value, field, value, expected, remedy)
        return
    expected = f"a model, from which the loss {name} learns"
    remedy = "Name a folder, a model on the hub, or a teacher_hint for the policy to teach itself."
    expect(bool(named), "teacher", "", expected, remedy)
    records = config.truncates or config.generator.router_replay
    expected = "none with sampling.top_p, top_k, min_p or generator.router_replay, which record each token of the policy's prompt"
    hinted = bool(records and config.teacher_hint)
    expect(not hinted, "teacher_hint", config.teacher_hint, expected, "Leave one out.")
    fits = not config.more_teachers or (loss.divergence_beta is None and bool(config.teacher))
    expected = "none without teacher, which the other rows have, and none with the exact divergence, whose packs have one teacher"
    remedy = "Use the loss Distill, and name a teacher."
    expect(fits, "more_teachers", config.more_teachers, expected, remedy)
