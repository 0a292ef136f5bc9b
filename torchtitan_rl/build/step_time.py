"""The seconds that a step is expected to take: the least time of its parts over the share of the speed that they reach."""

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_rl import device
from torchtitan_rl.build.memory import footprint_of, teacher_spec
from torchtitan_rl.models.lora.adapters import Lora
from torchtitan_rl.observe.machine import Speeds, measured_speeds
from torchtitan_rl.observe.metrics.efficiency import TokenFlops, bound_seconds
from torchtitan_rl.trainer.model_loader import meta_model
from torchtitan_rl.types import Prompt

if TYPE_CHECKING:
    from torchtitan_rl.config import RunConfig

SHARES = {"decode": 0.3, "train": 0.4, "sync": 0.3, "teacher": 0.4}
"""Share of the least time's speed that a part of a step reaches on a GPU."""
CPU_PRODUCTS = 0.85
"""Share of the peak that a CPU's matrix products reach."""
CPU_BYTES_PER_FLOP = 0.11
"""Bytes that the other operations of an update move for each operation of its products."""
CPU_SYNC = 0.015
"""Share of the memory's speed that a push reaches, with its proof."""
CPU_LAYER_SECONDS = 0.005
"""Seconds that a layer takes for a decoding step beside its products."""


def cpu_shares(speeds: Speeds, train_dtype: str) -> dict[str, float]:
    """`SHARES` of a CPU: the faster its products are, the more of an update is other operations."""
    # Seconds of other operations for a second of products at the peak.
    moved = CPU_BYTES_PER_FLOP * speeds.flops_per_s[train_dtype] / speeds.memory_bytes_per_s
    update = 1 / (1 / CPU_PRODUCTS + moved)
    return {"decode": CPU_PRODUCTS, "train": update, "sync": CPU_SYNC, "teacher": update}


def draw_lengths(num: int, *, mean: float, longest: int, spread: float = 0.8) -> np.ndarray:
    """Returns lengths of completions, [num], log-normal with this mean before the cut at `longest`. spread 0: all equal."""
    rng = np.random.default_rng(0)
    drawn = rng.lognormal(np.log(mean) - spread**2 / 2, spread, num)
    return np.clip(np.rint(drawn), 1, longest).astype(int)


def teacher_flops(
    teacher: ModelSpec, student: TokenFlops, work: Sequence[float], *, exact: bool
) -> float:
    """The operations that a teacher adds to a step: its forward over the step's tokens, and the exact divergence.

    The exact divergence computes both heads' logits three times, and the student's gradient once.

    Args:
        work: tokens, attended pairs and scored tokens of the step.
    """
    flops = TokenFlops.of(teacher.model, meta_model(teacher))
    scored = work[2]
    return flops.forward(work) + exact * scored * (2 * flops.head + 5 * student.head)


def step_bounds(
    config: "RunConfig",
    *,
    lengths: list[tuple[int, int]],
    world_size: int,
    speeds: Speeds,
    teacher: ModelSpec | None = None,
    sharing: int = 1,
) -> dict[str, float]:
    """Returns the least seconds of a step's "decode", "train", "sync" and, with one, "teacher": see `bound_seconds`.

    Args:
        lengths: (prompt tokens, sampled tokens) of every sequence.
        sharing: sequences for which the update computes a prompt once.
    """
    model = meta_model(config.model_spec, Lora.of(config.trainer.lora))
    passes = config.trainer.num_epochs
    tokens = sum(prompt / sharing + sampled for prompt, sampled in lengths)
    attended = sum((prompt + sampled) * (prompt + sampled + 1) / 2 for prompt, sampled in lengths)
    work = [
        passes * tokens,
        passes * attended,
        passes * sum(sampled for _, sampled in lengths),
    ]  # in either pass
    footprint = footprint_of(config, model=model, world_size=world_size)
    bounds = bound_seconds(lengths, work=[work, work], speeds=speeds, footprint=footprint)
    if not config.samples_training:
        bounds = {"train": bounds["train"]}
    if teacher is not None:
        loss = config.algorithm.build(max_completion_tokens=config.sampling.max_tokens).policy_loss
        added = teacher_flops(
            teacher, footprint.flops, work, exact=loss.divergence_beta is not None
        )
        bounds["teacher"] = added / world_size / speeds.flops_per_s[footprint.train_dtype]
    return bounds


def step_seconds(config: "RunConfig", *, prompt: int, mean: int, world_size: int) -> float:
    """Returns the expected seconds of a step on this machine, without rewards, evaluations and checkpoints.

    Args:
        prompt: tokens of a prompt.
        mean: tokens that a completion has on average. The longest has `sampling.max_tokens`, or, of demonstrations, as many.
    """
    num = config.num_prompts_per_step * config.sampling.n
    longest = config.sampling.max_tokens if config.samples_training else mean
    sampled = draw_lengths(num, mean=mean, longest=longest, spread=0.8 * (mean < longest))  # [num]
    on_a_cpu = device.ON_CPU
    speeds = measured_speeds(*config.dtypes.values())
    bounds = step_bounds(
        config,
        lengths=[(prompt, int(length)) for length in sampled],
        world_size=1 if on_a_cpu else world_size,  # ranks of a CPU share its cores
        speeds=speeds,
        teacher=teacher_spec(config),
        sharing=config.sampling.n if on_a_cpu else 1,
    )
    shares = (
        cpu_shares(speeds, config.dtypes["trainer.mixed_precision_param"]) if on_a_cpu else SHARES
    )
    found = sum(bound / shares[part] for part, bound in bounds.items())
    if on_a_cpu and config.samples_training:
        found += CPU_LAYER_SECONDS * len(config.model_spec.model.layers) * sampled.max()
    return float(found)


def two_digits(number: float) -> str:
    """Example: two_digits(268.0) == "270", where a format of two digits alone gives 2.7e+02"""
    return f"{float(f'{number:.2g}'):g}"


def expected_time(config: "RunConfig", prompts: list[Prompt], world_size: int) -> str:
    """Returns the expected seconds of a step on this machine, and the two settings that change them most, as text."""
    prompt = round(sum(len(one.token_ids) for one in prompts) / len(prompts))
    on = {"prompt": prompt, "world_size": world_size}
    if not config.samples_training:
        mean = round(sum(len(one.demonstration.token_ids) for one in prompts) / len(prompts))
        return f"a step: about {two_digits(step_seconds(config, mean=mean, **on))} s, right within a factor of two"
    most = config.sampling.max_tokens
    whole, quarter = (step_seconds(config, mean=mean, **on) for mean in (most, max(1, most // 4)))
    prompts_a_step, n = config.num_prompts_per_step, config.sampling.n
    smaller = {
        f"--num-prompts-per-step {prompts_a_step // 2}": replace(
            config, num_prompts_per_step=prompts_a_step // 2
        ),
        f"--sampling.n {n // 2}": replace(config, sampling=replace(config.sampling, n=n // 2)),
        f"--sampling.max-tokens {most // 2}": replace(
            config, sampling=replace(config.sampling, max_tokens=most // 2)
        ),
    }
    seconds = {
        option: step_seconds(half, mean=half.sampling.max_tokens, **on)
        for option, half in smaller.items()
        if half.num_prompts_per_step and half.sampling.n > 1 and half.sampling.max_tokens
    }
    first = sorted(seconds.items(), key=itemgetter(1))[:2]
    return (
        f"a step: about {two_digits(whole)} s if all completions have {most} tokens, {two_digits(quarter)} s if they have a quarter of "
        "them on average; right within a factor of two, rewards, evaluations and checkpoints left out\n"
        + "what changes it most: "
        + "; ".join(f"{option}, {two_digits(value)} s" for option, value in first)
    )
