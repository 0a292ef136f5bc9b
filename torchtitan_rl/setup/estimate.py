"""Estimates the time of a config's step and its memory: the command `torchtitan-rl estimate`."""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from torchtitan_rl.core import device  # noqa: F401  (before torchtitan)

# isort: split
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_rl.core.config import MANY, check_fields
from torchtitan_rl.core.errors import UserError
from torchtitan_rl.library import named_models
from torchtitan_rl.library.models import hf_architecture, spec_from_folder
from torchtitan_rl.observability.machine import Speeds, measured_speeds
from torchtitan_rl.setup import step_model
from torchtitan_rl.setup.memory import (
    choose_by_memory,
    memory_need,
    teacher_spec,
)
from torchtitan_rl.setup.registry import load_config
from torchtitan_rl.setup.step_time import SHARES, SHARES_ON_A_CPU, step_bounds
from torchtitan_rl.setup.validation import check_layout

if TYPE_CHECKING:
    from torchtitan_rl.setup.run_config import RunConfig

GIB = 2**30


def _speeds(float32: float, bfloat16: float, memory: float) -> Speeds:
    return Speeds(flops_per_s={"float32": float32, "bfloat16": bfloat16}, memory_bytes_per_s=memory)


# From the data sheets: dense peak FLOP/s (float32 without tensor cores, bfloat16), memory bytes/s; GiB.
GPUS = {
    "A100": (_speeds(19.5e12, 312e12, 2.04e12), 80),
    "H100": (_speeds(67e12, 989e12, 3.35e12), 80),
    "H200": (_speeds(67e12, 989e12, 4.8e12), 141),
    "B200": (_speeds(75e12, 2250e12, 8.0e12), 180),
}


QUANTILES = {"min": 0.0, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}


def quantiles_of(run: Path) -> list[tuple[float, float]]:
    """Returns (share, tokens) of the longest completion of a run's groups: the mean of its steps' quantiles, in order.

    Raises UserError if the run has none.
    """
    file = run / "metrics.jsonl"
    try:
        steps = [json.loads(line) for line in file.read_text().splitlines()]
        found = {
            name: [s[key] for s in steps if (key := f"completions/group_longest/{name}") in s] for name in QUANTILES
        }
        return [(share, fmean(found[name])) for name, share in QUANTILES.items()]
    except (
        OSError,
        ValueError,
        TypeError,
        RecursionError,
    ) as error:  # not the folder of a run, one without a step, or a damaged line
        raise UserError(
            f"--run = '{run}': expected a run with training steps, but {file} has no lengths: {error}."
        ) from error


def drawn(quantiles: Sequence[tuple[float, float]], rng: random.Random) -> float:
    """Returns a length at random, linear between the quantiles."""
    share = rng.random()
    for (low, short), (high, long) in zip(quantiles, quantiles[1:], strict=False):
        if share <= high:
            return short + (long - short) * (share - low) / (high - low)
    return quantiles[-1][1]


def tokens_waited(
    quantiles: Sequence[tuple[float, float]], *, needed: int, prompts: int, max_age: int, steps: int = 400
) -> float:
    """Returns how many tokens a step takes to sample, one after another, until `needed` groups are whole."""
    rng = random.Random(0)
    going: list[tuple[int, float]] = []  # (step that began it, tokens left)
    waited = 0.0
    for step in range(steps):
        going += [(step, drawn(quantiles, rng)) for _ in range(max(needed, prompts) - len(going))]
        urgent = [one for one in going if step - one[0] >= max_age][:needed]
        others = sorted((one for one in going if one not in urgent), key=lambda one: one[1])
        taken = urgent + others[: needed - len(urgent)]
        took = max(left for _, left in taken)
        waited += took
        going = [(since, max(0.0, left - took)) for since, left in going if (since, left) not in taken]
    return waited / steps


def print_in_flight(run: Path, *, needed: int, max_age: int) -> None:
    """Prints the gain for several numbers of prompts in flight. One token of all sequences is taken to cost the same."""
    quantiles = quantiles_of(run)
    alone = tokens_waited(quantiles, needed=needed, prompts=0, max_age=max_age)
    print(f"in_flight.prompts, with the lengths of {run}: at most so much faster generation (max_age {max_age})")
    for prompts in (needed * 5 // 4, needed * 3 // 2, needed * 2):
        gain = alone / tokens_waited(quantiles, needed=needed, prompts=prompts, max_age=max_age)
        print(f"{prompts:7d}  {gain:.2f} x")


def print_curve(spec: ModelSpec, *, sequences: int, prompt: int, mean: int, longest: int) -> None:
    """Prints the step of `sequences` completions by parts, for each number of GPUs with its best layout."""
    model = step_model.Model.of(spec)
    work = step_model.Work(lengths=step_model.draw_lengths(sequences, mean=mean, longest=longest), prompt=prompt)
    print(
        f"{sequences} completions of {work.lengths.mean():,.0f} tokens on average, at most {longest:,}; seconds on H100"
    )
    print("  GPUs  engine  FSDP  decode  straggler  update  gathers  push  saved    step  tokens/s/GPU  separate")
    for gpus in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        found = step_model.best(work, model, gpus, step_model.H100)
        if found is None:
            print(f"{gpus:6d}  does not fit")
            continue
        layout, parts = found
        step = sum(parts.values())
        apart = step_model.separate_seconds(work, model, gpus, step_model.H100, engine=layout.engine)
        shown = (parts["decode"], parts["straggler"], parts["update"], parts["gathers"], parts["push"])
        saved = parts["checkpoint"] + parts["restarts"]
        print(
            f"{gpus:6d}  {layout.engine:6d}  {layout.shards:4d}  {shown[0]:6.1f}  {shown[1]:9.1f}  {shown[2]:6.1f}  {shown[3]:7.1f}"
            f"  {shown[4]:4.1f}  {saved:5.1f}  {step:6.1f}  {work.lengths.sum() / step / gpus:12,.0f}  {step / apart:7.2f} x"
        )


def folder_of(name: str, scratch: Path) -> Path:
    """Returns a model's folder: `name` itself, or for a size of Qwen3, such as 8B, one in `scratch` that has its config.json."""
    if Path(name).is_dir():
        return Path(name)
    spec = named_models.qwen3(name)
    entries = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **hf_architecture(spec.model)}
    entries["max_position_embeddings"] = spec.model.max_seq_len
    folder = scratch / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(entries))
    return folder


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """The command."""
    if args.curve and (args.gpus, args.gpu) != (1, "H100"):
        parser.error("--curve has the numbers of H100 from 1 to 1,024: leave out --gpus and --gpu")
    for name, value in vars(args).items():
        most = 1 if name.endswith("share") else MANY
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not 0 < value <= most:
            parser.error(f"--{name.replace('_', '-')} {value}: expected a number above 0 and at most {most}")
    device.ON_CPU = device.ON_CPU and args.gpu == "here"  # a config is sized for the machine that is asked about
    try:
        config = load_config(args.config)
        check_fields(config)
        if not args.curve:
            check_layout(config, args.gpus)
        with TemporaryDirectory() as scratch:
            if args.model:
                config.model_spec = spec_from_folder(folder_of(args.model, Path(scratch)))
            if args.teacher:
                config.teacher = str(folder_of(args.teacher, Path(scratch)))
            if config.model_spec is None:
                parser.error(
                    f"--config {args.config} reads its model from a folder: name one, or a size of Qwen3, with --model"
                )
            print_estimate(config, args, parser)
        if args.run is not None:
            print_in_flight(args.run, needed=config.num_prompts_per_step, max_age=config.in_flight.max_age)
    except UserError as error:
        parser.error(str(error).replace("or NGPU", "or --gpus"))


def print_estimate(config: "RunConfig", args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Prints the time of a step and of the run, and the memory, on `args.gpus` of `args.gpu`."""
    loss = config.algorithm.build(max_completion_tokens=config.sampling.max_tokens).policy_loss
    teacher = teacher_spec(config)
    if loss.needs_teacher and teacher is None:
        parser.error(
            f"--config {args.config} learns from a teacher: name its folder, or a size of Qwen3, with --teacher"
        )
    if args.teacher and not loss.needs_teacher:
        parser.error(f"--teacher {args.teacher}: --config {args.config} learns from none, leave it out")
    speeds, gib = GPUS[args.gpu] if args.gpu in GPUS else (measured_speeds(*config.dtypes.values()), None)
    prompt = args.prompt_tokens or config.prompts.max_prompt_tokens // 2
    completion = args.completion_tokens or config.sampling.max_tokens
    sequences = config.num_prompts_per_step * config.sampling.n
    if args.curve:
        longest = max(config.sampling.max_tokens, 4 * completion)
        print_curve(
            config.model_spec, sequences=args.sequences or sequences, prompt=prompt, mean=completion, longest=longest
        )
        return
    length, positions = prompt + completion, config.model_spec.model.max_seq_len
    if length > positions:
        parser.error(
            f"--prompt-tokens {prompt} and --completion-tokens {completion}: expected at most {positions} together"
        )
    bounds = step_bounds(
        config,
        lengths=[(prompt, completion)] * sequences,
        world_size=args.gpus,
        speeds=speeds,
        teacher=teacher,
    )
    given = {
        "decode": args.decode_share,
        "train": args.train_share,
        "sync": args.sync_share,
        "teacher": args.train_share,
    }
    shares = (SHARES_ON_A_CPU if device.ON_CPU else SHARES) | {k: v for k, v in given.items() if v is not None}
    print(f"{args.config} on {args.gpus} x {args.gpu}: {sequences} sequences of {prompt} + {completion} tokens")
    for name, bound in bounds.items():
        print(f"{name:7s} {bound / shares[name]:8.2f} s expected, {bound:8.2f} s at least")
    total = sum(bound / shares[name] for name, bound in bounds.items())
    kind = "new" if config.samples_training else "learned"
    print(f"step    {total:8.2f} s expected, {sequences * completion / total:,.0f} {kind} tokens a second")
    print(
        f"run     {total * config.num_steps / 60:8.1f} min expected for {config.num_steps} steps, without evaluations"
    )
    if gib is not None:
        print(choose_by_memory(config, world_size=args.gpus, gpu_bytes=gib * GIB))
        need = memory_need(config, world_size=args.gpus, gpu_bytes=gib * GIB)
        verdict = "fits" if need.peak <= gib * GIB else "does not fit: more GPUs, or a smaller micro-batch or engine"
        print(f"memory  {need.peak / GIB:.1f} GiB: {verdict} {gib} GiB")
