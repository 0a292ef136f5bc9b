"""Estimates the time of a config's step and its memory: the command `torchtitan-rl estimate`."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from torchtitan_rl.core import device  # noqa: F401  (before torchtitan)

# isort: split
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_rl.core.config import MANY, check_fields
from torchtitan_rl.core.errors import UserError
from torchtitan_rl.library import named_models
from torchtitan_rl.library.lora.adapters import Lora
from torchtitan_rl.library.models import hf_architecture, spec_from_folder
from torchtitan_rl.observability.machine import Speeds, measured_speeds
from torchtitan_rl.observability.metrics.efficiency import TokenFlops, bound_seconds
from torchtitan_rl.setup.memory import (
    choose_by_memory,
    footprint_of,
    memory_need,
    meta_model,
    teacher_spec,
)
from torchtitan_rl.setup.registry import load_config
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


def teacher_flops(teacher: ModelSpec, student: TokenFlops, work: Sequence[float], *, exact: bool) -> float:
    """The operations that a teacher adds to a step: its forward over the step's tokens, and the exact divergence.

    The exact divergence computes both heads' logits three times, and the student's gradient once.

    Args:
        work: tokens, attended pairs and scored tokens of the step.
    """
    flops = TokenFlops.of(teacher.model, meta_model(teacher))
    scored = work[2]
    return flops.forward(work) + exact * scored * (2 * flops.head + 5 * student.head)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """The command."""
    for name, value in vars(args).items():
        most = 1 if name.endswith("share") else MANY
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not 0 < value <= most:
            parser.error(f"--{name.replace('_', '-')} {value}: expected a number above 0 and at most {most}")
    device.ON_CPU = device.ON_CPU and args.gpu == "here"  # a config is sized for the machine that is asked about
    try:
        config = load_config(args.config)
        check_fields(config)
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
    length, positions = prompt + completion, config.model_spec.model.max_seq_len
    if length > positions:
        parser.error(
            f"--prompt-tokens {prompt} and --completion-tokens {completion}: expected at most {positions} together"
        )
    model = meta_model(config.model_spec, Lora.of(config.trainer.lora))
    passes = config.trainer.num_epochs * sequences
    work = [passes * length, passes * length * (length + 1) / 2, passes * completion]  # in either pass
    footprint = footprint_of(config, model=model, world_size=args.gpus)
    bounds = bound_seconds([(prompt, completion)] * sequences, work=[work, work], speeds=speeds, footprint=footprint)
    if not config.samples_training:
        bounds = {"train": bounds["train"]}
    if teacher is not None:
        added = teacher_flops(teacher, footprint.flops, work, exact=loss.divergence_beta is not None)
        bounds["teacher"] = added / args.gpus / speeds.flops_per_s[footprint.train_dtype]
    shares = {
        "decode": args.decode_share,
        "train": args.train_share,
        "sync": args.sync_share,
        "teacher": args.train_share,
    }
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
