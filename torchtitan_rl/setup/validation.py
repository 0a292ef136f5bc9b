"""Checks a config before a process group starts."""

import os
import re
from dataclasses import Field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torchtitan.config import Configurable, ParallelismConfig

from torchtitan_rl.common.field_limits import check_fields, check_number, parts
from torchtitan_rl.core.algorithm import NoCorrection
from torchtitan_rl.core.config import number
from torchtitan_rl.core.device import ON_CPU
from torchtitan_rl.core.errors import expect
from torchtitan_rl.core.generator.sampling import SamplingConfig
from torchtitan_rl.library.demonstrations import HELD_OUT_LOSS
from torchtitan_rl.library.environments.factory import Conversations, may_answer
from torchtitan_rl.library.environments.vllm_parsers import check_parser_name
from torchtitan_rl.library.models.hf_decoder import check_other_parts, check_parallelism
from torchtitan_rl.library.models.mixture_of_experts import check_mixture
from torchtitan_rl.library.objectives import Gdpo
from torchtitan_rl.library.references import correctable, did_you_mean, is_users_class, load_function
from torchtitan_rl.library.task import Task
from torchtitan_rl.observability.metrics.evaluation_stats import evaluation_names
from torchtitan_rl.observability.select import Selection
from torchtitan_rl.observability.sinks import chosen_sinks
from torchtitan_rl.resilience.checkpoint_folder import check_form
from torchtitan_rl.resilience.out_of_memory import GIB, usable_bytes
from torchtitan_rl.setup.dump_folder import check_dump_folder
from torchtitan_rl.setup.identity import built_by
from torchtitan_rl.setup.lengths import check_lengths
from torchtitan_rl.setup.memory import check_memory, gpu_memory_bytes
from torchtitan_rl.setup.own_sinks import load_own_sinks
from torchtitan_rl.setup.teacher_folder import check_asked

if TYPE_CHECKING:
    from torchtitan_rl.setup.run_config import RunConfig

_DEGREE: Field = number(1, least=1, remedy="1 turns it off.")
"""The limit of degrees in torchtitan's own config, which declares none."""

LEAST_IN_BFLOAT16 = 0.02
"""A smaller limit on the difference of single tokens ends healthy runs in bfloat16: `debug` shows 0.003 in a step of 70 tokens."""

_ONLY: dict[str, tuple[object, str, str]] = {
    "trainer.parallelism.pipeline_parallel_degree": (1, "as it is not supported", "Use FSDP, HSDP and TP."),
    "trainer.parallelism.context_parallel_degree": (1, "as it is not supported", "Use FSDP, HSDP and TP."),
    "trainer.parallelism.spmd_backend": ("partial_dtensor", "the only one for this torch", "Leave it at its default."),
    "comm.train_timeout_seconds": (100, "as it has no effect", "Set comm.init_timeout_seconds."),
    "comm.mode": ("default", "as training is real", "Leave it at its default."),
}
"""Fields of torchtitan's own configs with the only value that works here, the reason and the remedy."""

for _unused in fields(ParallelismConfig):
    if _unused.name.startswith(("pipeline_parallel_", "context_parallel_", "module_fqns_")):
        _reason = (_unused.default, "as it has no effect", "Leave it at its default.")
        _ONLY.setdefault(f"trainer.parallelism.{_unused.name}", _reason)

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of an attention head that vLLM's CPU kernels support."""

LEAST_TEMPERATURE = 0.01
"""vLLM samples at this temperature when a lower one is asked for, except for 0, which is greedy."""


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
        check_number(number(1800, least=1), config.comm.init_timeout_seconds, "comm.init_timeout_seconds")
    for field, (only, why, remedy) in _ONLY.items():
        value = attrgetter(field)(config)
        expect(type(value) is type(only) and value == only, field, value, f"{only!r}, {why}", remedy)
    _check_limits(config)
    chosen_sinks(config.metrics.sinks, load_own_sinks(config.metrics.sinks))
    Selection(config.metrics.select)
    titles = [chart.partition("=")[0] for chart in config.metrics.charts]
    expect(len({*titles}) == len(titles), "metrics.charts", titles, "another title for each", "Rename one.")
    for chart in config.metrics.charts:
        title, _, keys = chart.partition("=")
        named = bool(title) and all(keys.split(","))
        expect(named, "metrics.charts", chart, "title=metric,metric", 'Example: "Characters=extra/brevity/characters".')
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
    if not os.path.isdir(config.hf_assets_path):  # the positions of a folder's model are read later: see check_model
        check_lengths(config, _samplings(config))
    _check_training(config)
    _check_used(config)
    _check_in_flight(config, replicas=world_size // config.generator.tensor_parallel_degree)
    cut, cache = config.algorithm.truncation.cut, config.algorithm.truncation.cache_tokens
    ends = 'reasons other than "stop", by which a completion ends that was not cut'
    expect("stop" not in cut, "algorithm.truncation.cut", cut, ends, "Leave it out.")
    for sampling in (config.sampling, *config.task.samplings().values()):
        longest = f"at most the longest completion ({sampling.max_tokens} tokens)"
        fits = cache is None or cache <= sampling.max_tokens
        expect(fits, "algorithm.truncation.cache_tokens", cache, longest, "Lower it or allow longer completions.")
        config.algorithm.build(max_completion_tokens=sampling.max_tokens).validate_sampling(sampling.n)
    check_asked(config)


def _check_best(config: "RunConfig") -> None:
    """Check that `evaluation.best_by` names a metric of an evaluation that takes place, and that something uses it."""
    best_by, stops = config.evaluation.best_by, config.evaluation.stop_after
    asked = "a metric, as evaluation.stop_after asks"
    remedy = f"Use evaluation/accuracy; for demonstrations, -{HELD_OUT_LOSS}."
    expect(bool(best_by or not stops), "evaluation.best_by", "", asked, remedy)
    known = not best_by or best_by.removeprefix("-").startswith("evaluation/")
    expect(known, "evaluation.best_by", best_by, "a metric of the evaluation", "Use evaluation/accuracy.")
    on = bool(config.evaluation.every) or not best_by
    expect(on, "evaluation.every", 0, "1 or more, as evaluation.best_by asks", "Use 10.")
    kept = "one that something uses: with checkpoint.enable False and stop_after 0 there is no best checkpoint to keep"
    used = config.checkpoint.enable or stops or not best_by
    expect(bool(used), "evaluation.best_by", best_by, kept, "Leave it out, or save checkpoints.")


def _check_whole(config: Any, path: str = "") -> None:
    """Check that no part is silently another one: that its Config builds its class, and that its methods have names that are used."""
    for declared in fields(config):
        for key, part in parts(getattr(config, declared.name)):
            name = f"{path}.{declared.name}.{key}".strip(".")
            if isinstance(part, Configurable.Config):
                if built_by(part) is type(part):
                    _check_builds(name, type(part))
                else:
                    _check_overrides(name, built_by(part))
                _check_whole(part, name)


def _check_overrides(field: str, built: type) -> None:
    """Check that a user's part of the objective overrides something of its base."""
    if not field.startswith("algorithm") or not is_users_class(built):
        return
    own = [name for name in vars(built) if name in ("__init__", "__call__") or not (name[0] == "_" or name == "Config")]
    used = not own or any(hasattr(base, name) for base in built.__bases__ for name in own)
    expected = f"a class that overrides something of its base, but its {own} are none, so nothing uses them"
    expect(used, field, built.__qualname__, expected, "Rename them.")


def _check_builds(field: str, config: type) -> None:
    """Check that a config that is nested in no class has no fields that the class which it silently builds cannot read."""
    bases = config.__mro__
    nested = next((base for base in bases if "_owner" in vars(base)), config)
    has_build = any("build" in vars(base) for base in bases[: bases.index(nested)])
    expected = (
        f"a Config inside the class that it builds, as this one builds {nested.__qualname__.removesuffix('.Config')}"
    )
    added = {one.name for one in fields(config)} - {one.name for one in fields(nested)}
    sound = nested is Configurable.Config or has_build or not added
    expect(sound, field, config.__qualname__, expected, "Move it into your class, as Config.")


def _check_evaluates(config: "RunConfig") -> None:
    """Check that evaluations that are asked for have samples. Those of demonstrations have the held-out loss."""
    passes, asked = (
        config.evaluation.build().passes,
        config.eval_only or config.evaluation.every and config.samples_training,
    )
    why = "with eval_only" if config.eval_only else f"with evaluation.every {config.evaluation.every}"
    remedy = "evaluation.every 0 turns evaluation off."
    expect(
        bool(passes) or not asked,
        "evaluation.sampling.n",
        0,
        f"1 or more, here or in evaluation.sampled, {why}",
        remedy,
    )


def check_task(config: "RunConfig", task: Task) -> None:
    """Check what depends on the built task: the metric of `evaluation.best_by`, and the settings of conversations.

    Raises:
        UserError: as `validate`.
    """
    best_by, known = config.evaluation.best_by, set()
    members = task.members()
    judged = any(getattr(member, "has_answers", True) for member in members.values())
    for one in () if any(map(may_answer, members.values())) else fields(Conversations.Config):
        value, unused = getattr(config.conversations, one.name), "as the task has neither tools nor environments"
        expect(value == one.default, f"conversations.{one.name}", value, f"{one.default!r}, {unused}", "Leave it out.")
    if not config.samples_training:
        known.add(f"-{HELD_OUT_LOSS}")
    for evaluation_pass, sampling in config.evaluation.build().passes.items():
        names = evaluation_names(sampling.n, judged=judged)
        prefixes = [evaluation_pass.prefix, *(f"{evaluation_pass.prefix}/{member}" for member in members if member)]
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


def learning_warnings(config: "RunConfig") -> list[str]:
    """A sentence for each setting that leaves less to learn than one would expect."""
    if config.eval_only:
        return []
    found, warmup, steps, kl = [], config.trainer.lr_scheduler.warmup_steps, config.num_steps, config.algorithm.kl
    if getattr(config.trainer.optimizer, "lr", None) == 0:
        found.append("trainer.optimizer.lr is 0: nothing is learned")
    elif warmup > steps:
        found.append(
            f"trainer.lr_scheduler.warmup_steps {warmup} is longer than the run, num_steps {steps}: the learning rate rises to its end"
        )
    if kl.coef > 0 and (kl.estimator, kl.placement) == ("k1", "loss"):
        found.append(
            "algorithm.kl.estimator k1 in the loss has an expected gradient of 0; k2 and k3 pull to the reference"
        )
    return found


def _check_limits(config: "RunConfig") -> None:
    """Check the order of the watchdog's limits: it must speak before it ends a job, and end it before a collective gives up."""
    limits, timeout = config.watchdog, config.comm.init_timeout_seconds
    expect(
        limits.notice_seconds < limits.limit_seconds, "watchdog.notice_seconds", limits.notice_seconds,
        f"less than watchdog.limit_seconds {limits.limit_seconds:g}, at which the job is ended", "Lower it, or raise the other.",
    )  # fmt: skip
    expect(
        timeout is None or limits.limit_seconds < timeout, "watchdog.limit_seconds", limits.limit_seconds,
        f"less than comm.init_timeout_seconds {timeout}, whose error names no rank", "Lower it, or raise the other.",
    )  # fmt: skip


def _check_cpu(config: "RunConfig") -> None:
    """Check what only a CPU limits: the size of vLLM's KV cache, the size of a head, and compilation."""
    given, gib = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"), usable_bytes() // GIB
    expected = f"a whole number of GiB for each rank, between 1 and the {gib} of the memory here"
    holds = given.isdecimal() and 1 <= int(given) <= gib
    expect(holds, "VLLM_CPU_KVCACHE_SPACE", given, expected, "Leave it out for 1.")
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
    expect(
        config.trainer.compile_head is not True, "trainer.compile_head", True, "auto or False on a CPU, where torch.compile is off",
        "Leave it out.",
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
    for field, degree in (("trainer.parallelism", tp), ("generator", config.generator.tensor_parallel_degree)):
        for what, size in divided.items():
            expect(
                size % degree == 0, f"{field}.tensor_parallel_degree", degree, f"a divisor of the model's {size} {what}",
                "Use another degree.",
            )  # fmt: skip
    for field, sampling in _samplings(config).items():
        token, known = max(sampling.stop_token_ids, default=0), f"token ids below the model's {model.vocab_size}"
        expect(token < model.vocab_size, f"{field}.stop_token_ids", token, known, "Use the tokenizer's ids.")
    check_lengths(config, _samplings(config))
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
        expect(local <= gpus, "NGPU", local, f"at most the {gpus} GPUs of this node", "Start that many processes.")
    for name in ("tensor_parallel_degree", "data_parallel_replicate_degree", "expert_parallel_degree"):
        check_number(_DEGREE, getattr(p, name), f"trainer.parallelism.{name}")
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
    _check_replicas(world_size, config.generator.tensor_parallel_degree, config.num_prompts_per_step)


def _check_samples(config: "RunConfig") -> None:
    """Check that every sampling config draws samples, at a temperature that vLLM does not change."""
    for field, sampling in _samplings(config).items():
        expect(sampling.n >= 1, f"{field}.n", sampling.n, "at least 1 and at most 65536", "Use 8.")
        expect(
            sampling.n == 1 or sampling.temperature > 0, f"{field}.n", sampling.n,
            "1 with temperature 0, as all samples would be equal", f"Set {field}.temperature, or lower it.",
        )  # fmt: skip
        holds = sampling.temperature == 0 or sampling.temperature >= LEAST_TEMPERATURE
        least = f"at least {LEAST_TEMPERATURE}: vLLM would sample at that, and the trainer would score at another"
        expect(holds, f"{field}.temperature", sampling.temperature, least, "1.0 is usual.")
        escaped = any(re.fullmatch(r"(\\[nrt])+", text) for text in sampling.stop)
        characters = "the characters themselves, not a backslash and a letter"
        expect(not escaped, f"{field}.stop", sampling.stop, characters, f"In a shell: --{field}.stop $'\\n'.")


def _samplings(config: "RunConfig") -> dict[str, SamplingConfig]:
    """All sampling configs that the run uses, by field."""
    passes = {"sampling": config.sampling, **config.task.samplings()}
    of_evaluation = {"evaluation.sampling": config.evaluation.sampling, "evaluation.sampled": config.evaluation.sampled}
    return passes | {field: sampling for field, sampling in of_evaluation.items() if sampling.n}


def _check_sampling(config: "RunConfig") -> None:
    """Check that the run's sampling config and those of a mixture's members can be trained on together."""
    longest, temperature = config.sampling.max_tokens, config.sampling.temperature
    expect(temperature > 0, "sampling.temperature", temperature, "more than 0 in training", "1.0 is usual.")
    expect(
        config.samples_training or temperature == 1, "sampling.temperature", temperature,
        "1 with demonstrations, whose likelihood is the policy's own", "evaluation.sampling has its own.",
    )  # fmt: skip
    turn, most = config.conversations.max_turn_tokens, max(one.max_tokens for one in _samplings(config).values())
    expect(
        turn is None or turn <= most, "conversations.max_turn_tokens", turn,
        f"at most sampling.max_tokens {most}, which all turns of the policy share", "Lower it, or leave it out.",
    )  # fmt: skip
    demonstrated = {"prompts.demonstrate": config.prompts.demonstrate or "none"}
    demonstrated["task.demonstrations"] = getattr(config.task, "demonstrations", "none")
    for field, given in demonstrated.items() if config.samples_training else ():
        unread = f"none with the loss {type(config.algorithm.loss).__qualname__.partition('.')[0]}, which samples completions"
        expect(
            given == "none",
            field,
            given,
            unread,
            "Leave it out, or learn from them: algorithm.loss Nll, as --config sft.",
        )
    replay = (
        "False with sampling.top_p, top_k or min_p: the engine records either its experts or the tokens that it kept"
    )
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
    if trainer.lora.rank:
        expect(bool(trainer.lora.targets), "trainer.lora.targets", (), "at least one", "Leave it out for all five.")
        expect(
            ON_CPU or config.generator.dtype == "bfloat16", "generator.dtype", config.generator.dtype,
            "bfloat16 with trainer.lora on a GPU, as vLLM's LoRA kernels have no float32", "Set it.",
        )  # fmt: skip
    coarse = [f"{field} bfloat16" for field, dtype in config.dtypes.items() if dtype == "bfloat16"]
    limit = trainer.logprob_gate.max_diff
    expect(
        not coarse or limit is None or limit >= LEAST_IN_BFLOAT16, "trainer.logprob_gate.max_diff", limit,
        f"None or at least {LEAST_IN_BFLOAT16} with {' and '.join(coarse)}: rounding alone would end the run",
        "Pass --trainer.logprob-gate.max-diff None.",
    )  # fmt: skip
    expect(
        trainer.num_minibatches <= config.num_prompts_per_step,
        "trainer.num_minibatches",
        trainer.num_minibatches,
        f"at most num_prompts_per_step {config.num_prompts_per_step}, as a mini-batch holds whole prompt groups",
        "Lower it, or raise the other.",
    )


def _check_used(config: "RunConfig") -> None:
    """Check that settings which only another one makes effective are set with it."""
    effective = {
        "algorithm.refill_rounds": (config.algorithm.zero_variance == "refill", 'algorithm.zero_variance "refill"'),
        "in_flight.max_age": (config.in_flight.prompts > 0, "in_flight.prompts"),
        "algorithm.truncation.cache_tokens": (
            config.algorithm.truncation.mode == "penalty",
            'algorithm.truncation.mode "penalty"',
        ),
    }
    for name in ("estimator", "placement"):
        effective[f"algorithm.kl.{name}"] = (config.algorithm.kl.coef > 0, "algorithm.kl.coef")
    for name in ("alpha", "targets"):
        effective[f"trainer.lora.{name}"] = (config.trainer.lora.rank > 0, "trainer.lora.rank")
    for name in ("temperature", "top_p", "top_k", "min_p"):
        effective[f"evaluation.sampled.{name}"] = (config.evaluation.sampled.n > 0, "evaluation.sampled.n")
    for field, (holds, by) in effective.items():
        group, _, name = field.rpartition(".")
        value, default = attrgetter(field)(config), type(attrgetter(group)(config)).__dataclass_fields__[name].default
        expect(holds or value == default, field, value, f"{default}, as {by} is not set", f"Set {by}, or leave it out.")
    if isinstance(config.algorithm.advantage, Gdpo.Config):
        weights, summed = config.algorithm.advantage.weights, config.grader.weights
        expect(weights == summed, "algorithm.advantage.weights", weights, f"{summed}, as grader.weights", "Set both.")


def _check_in_flight(config: "RunConfig", *, replicas: int) -> None:
    """Check that groups can be carried from step to step: how many, in equal shares, and with what else."""
    prompts, needed, algorithm = config.in_flight.prompts, config.num_prompts_per_step, config.algorithm
    if not prompts:
        return
    expect(config.samples_training, "in_flight.prompts", prompts, "0 with demonstrations: nothing is sampled", "Set 0.")
    expect(
        needed <= prompts <= 2 * needed, "in_flight.prompts", prompts,
        f"0, or num_prompts_per_step {needed} to twice as many, so that no group gets older than max_age", "Use 1.5 times.",
    )  # fmt: skip
    for field, count in {"in_flight.prompts": prompts, "num_prompts_per_step": needed}.items():
        share = (
            f"a multiple of the {replicas} generator replicas with in_flight.prompts, so that each has the same share"
        )
        expect(count % replicas == 0, field, count, share, "Change it.")
    alone = "with in_flight.prompts"
    expect(
        algorithm.zero_variance != "refill", "algorithm.zero_variance", "refill", f'"keep" or "drop" {alone}',
        "Groups in flight are a supply of new prompts already.",
    )  # fmt: skip
    corrected = algorithm.old_logprobs == "sampler" or not isinstance(algorithm.mismatch, NoCorrection.Config)
    expect(
        corrected, "algorithm.mismatch", "none", f"a correction {alone}, for tokens of older weights",
        'Use TokenTruncate.Config() (--algorithm.old-logprobs sampler: the ratio contains it).',
    )  # fmt: skip
    for field, sampling in {"sampling": config.sampling, **config.task.samplings()}.items():
        remedy = "Use stop_token_ids."
        expect(not sampling.stop, f"{field}.stop", sampling.stop, f"none {alone}: a text may span two steps", remedy)


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
