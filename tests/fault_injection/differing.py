"""Configs that are not the same on every rank, though each of their parts alone is in order."""

import os
import random
from dataclasses import dataclass

from torchtitan_rl.algorithm import Algorithm, GroupMean, RewardedGroup
from torchtitan_rl.configs.debug import debug
from torchtitan_rl.configs.toys.sum_digits import SumDigits
from torchtitan_rl.data.task import Example


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


class OwnData(SumDigits):
    """Every rank draws other examples, as a task that forgets the seed does."""

    @dataclass(kw_only=True, slots=True)
    class Config(SumDigits.Config):
        pass

    def train_example(self, index: int, *, seed: int) -> Example:
        """As debug's, by the rank."""
        return super().train_example(index + 1000 * rank(), seed=seed)


class RandomAdvantage(GroupMean):
    """Adds noise that every rank draws for itself. vLLM seeds `random` alike on all ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupMean.Config):
        pass

    def of_group(self, group: RewardedGroup) -> list[float]:
        """As debug's, with noise."""
        return [value + random.SystemRandom().random() for value in super().of_group(group)]


def other_seed():
    """debug whose seed follows the rank."""
    config = debug()
    config.seed = rank()
    return config


def other_data():
    """debug with an engine on 2 ranks, whose prompts follow the rank: the engine would wait without an end."""
    config = debug()
    config.trainer.parallelism.tensor_parallel_degree = 2
    config.generator.tensor_parallel_degree = 2
    config.task = OwnData.Config(max_integers=2, instruction="")
    return config


def other_advantages():
    """debug whose advantages have noise of each process."""
    config = debug()
    config.algorithm = Algorithm.Config(advantage=RandomAdvantage.Config())
    return config
