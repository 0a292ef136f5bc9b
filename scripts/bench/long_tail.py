"""A task whose answers have a long tail, for runs with groups in flight: `--config scripts/bench/long_tail.py:in_flight`.

Digits are added one after another, each total written out. Most prompts have a few digits, one in ten up to 30.
"""

import itertools
import random

from configs.debug import debug
from torchtitan_rl.core.algorithm import TokenTruncate
from torchtitan_rl.library.starts.warm_start import Recipe
from torchtitan_rl.library.task import Example
from torchtitan_rl.library.tasks import SumDigits
from torchtitan_rl.setup.run_config import RunConfig

MAX_TOKENS = 288


class LongTail(SumDigits):
    """Sums of 2 to 30 digits. The number of digits has a Pareto distribution."""

    def _draw(self, rng: random.Random) -> tuple[int, ...]:
        count = min(30, 1 + int(rng.paretovariate(1.0)))
        return tuple(rng.randint(1, 9) for _ in range(count))


def worked(example: Example, rng: random.Random) -> str:
    """Returns the running totals of an example. The habit: in over half of the answers, the last digit is forgotten."""
    digits = example.columns["operands"]
    totals = list(itertools.accumulate(digits))
    lines = [f"{a}+{b}={c}" for a, b, c in zip(totals, digits[1:], totals[1:], strict=False)]
    if len(lines) > 1 and rng.random() < 0.6:
        lines.pop()
    return f"{' '.join(lines)} [ANSWER] {lines[-1].partition('=')[2]}"


def recipe() -> Recipe:
    """Returns the recipe of the starting policy."""
    return Recipe(name="long_tail", worked=worked, steps=500)


def synchronous() -> RunConfig:
    """Every step waits for its longest completion."""
    config = debug()
    config.task = LongTail.Config(instruction="", warm_start=f"{__file__}:recipe")
    config.prompts.max_prompt_tokens = 160
    for sampling in (config.sampling, config.evaluation.sampling, config.evaluation.sampled):
        sampling.max_tokens = MAX_TOKENS
    config.generator.max_model_len = config.prompts.max_prompt_tokens + MAX_TOKENS
    config.algorithm.mismatch = TokenTruncate.Config()
    return config


def in_flight() -> RunConfig:
    """Half as many prompts again are in flight, and go on after the update."""
    config = synchronous()
    config.in_flight.prompts = config.num_prompts_per_step * 3 // 2
    return config
