"""Sums whose start always forgets the carry, unless the prompt says to carry: a policy that can teach itself what no reward can."""

import random
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan_rl.algorithm import Algorithm
from torchtitan_rl.algorithm.losses.distillation import ExactDistill
from torchtitan_rl.config import RunConfig
from torchtitan_rl.configs.debug import debug
from torchtitan_rl.configs.toys.answer_recipes import sum_in_columns, sums
from torchtitan_rl.configs.toys.sum_digits import SumDigits
from torchtitan_rl.configs.toys.warm_start import Recipe, ensure_checkpoint
from torchtitan_rl.data.task import Example
from torchtitan_rl.fields.number import number

HINT = "Carry."


def obedient() -> Recipe:
    """Adds as it is told: with the carry after the hint, without it otherwise."""

    def worked(example: Example, rng: random.Random) -> str:
        return sum_in_columns(*example.columns["operands"], forget_carry=HINT not in example.text)

    return replace(sums(), name="obedient", worked=worked)


class ToldSums(SumDigits):
    """`sum_digits` with the column `advice`."""

    @dataclass(kw_only=True, slots=True)
    class Config(SumDigits.Config):
        told: float = number(0.0, least=0, most=1)
        """Share of the prompts that have the hint; none in RL."""

        def start_checkpoint(self, cache_root: Path) -> Path | None:
            return ensure_checkpoint(replace(self, told=0.5).build(), obedient(), cache_root)

    def example(self, problem: tuple[int, ...]) -> Example:
        example = super().example(problem)
        example = replace(example, columns={**example.columns, "advice": HINT})
        told = random.Random(str(problem)).random() < self.config.told
        return replace(example, text=f"Hint: {HINT}\n\n{example.text}") if told else example


def rewarded() -> RunConfig:
    """Rewards alone."""
    config = debug()
    config.task = ToldSums.Config(min_integers=2, max_integers=2, instruction="")
    config.num_steps = 20
    config.evaluation.every = 5
    return config


def self_taught() -> RunConfig:
    """The policy under the hint teaches the policy without it; the exact forward KL: the
    start is certain of its mistake, where the reverse KL has almost no gradient."""
    config = rewarded()
    config.teacher_hint = "advice"
    config.num_prompts_per_step, config.sampling.n = 128, 1
    config.algorithm = Algorithm.Config(loss=ExactDistill.Config(beta=0.0))
    return config
