"""debug with a start of its own that takes long to make, in the folder that STARTS names."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan_rl.configs.debug import debug
from torchtitan_rl.configs.toys.answer_recipes import sums
from torchtitan_rl.configs.toys.sum_digits import SumDigits
from torchtitan_rl.configs.toys.warm_start import ensure_checkpoint


class LongStart(SumDigits):
    """Two integers, after a warm start that nobody waits for."""

    @dataclass(kw_only=True, slots=True)
    class Config(SumDigits.Config):
        def start_checkpoint(self, cache_root: Path) -> Path:
            """As debug's, of another recipe."""
            return ensure_checkpoint(self.build(), replace(sums(), steps=3_000), Path(os.environ["STARTS"]))


def from_a_long_start():
    """The config."""
    config = debug()
    config.task = LongStart.Config(min_integers=2, max_integers=2, instruction="")
    return config
