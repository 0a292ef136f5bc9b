"""What spreading prompts over replicas by their expected lengths would save of generation, by the formulas of metrics/efficiency.py.

    .venv/bin/python scripts/bench/spread.py [--sigma 0.8]

Every 8th prompt to a replica of one H100, as now, against the heaviest expected prompt first to the replica that has least. Lengths are
log-normal; half of the log's variance is the prompt's, and that half is known exactly. A replica takes its bound, a step its slowest.
"""

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from torchtitan_rl.core import device  # noqa: E402, F401  (before torchtitan)

# isort: split
import numpy as np  # noqa: E402

from scripts.estimate import GPUS  # noqa: E402
from torchtitan_rl.observability.metrics.efficiency import Footprint, TokenFlops, bound_seconds  # noqa: E402

REPLICAS, PROMPT_TOKENS, STEPS = 8, 128, 40
MODELS = {"0.6B": (0.596e9, 28), "8B": (8.19e9, 36)}
"""Parameters, layers; each layer has 8 key and value heads of 128 numbers."""
SHAPES = ((32, 8, 300, 512), (64, 8, 600, 1024), (256, 16, 2000, 8192))
"""Prompts, completions of each, mean tokens, most tokens."""


def seconds(lengths: np.ndarray, parameters: float, layers: int, *, ranks: int = 1) -> float:
    """The least time of decoding these completions on so many replicas that share them evenly."""
    footprint = Footprint(
        int(2 * parameters),
        2 * 2 * layers * 8 * 128,
        int(2 * parameters),
        ranks,
        1,
        "bfloat16",
        "bfloat16",
        TokenFlops(2 * parameters, 0, 0),
    )
    sequences = [(PROMPT_TOKENS, int(length)) for length in lengths.flat]
    return bound_seconds(sequences, work=((0, 0, 0), (0, 0, 0)), speeds=GPUS["H100"][0], footprint=footprint)["decode"]


def by_expected(expected: np.ndarray) -> list[list[int]]:
    """The prompts of each replica: the heaviest first, each to the replica that has least."""
    shares: list[list[int]] = [[] for _ in range(REPLICAS)]
    for prompt in np.argsort(-expected):
        min(shares, key=lambda share: expected[share].sum()).append(int(prompt))
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sigma", type=float, default=0.5, help="of the lengths' logarithm")
    sigma = parser.parse_args().sigma
    for name, model in MODELS.items():
        for prompts, n, mean, most in SHAPES:
            drawn, totals = np.random.default_rng(0), np.zeros(3)
            for _ in range(STEPS):
                known, unknown = (drawn.normal(0, sigma / math.sqrt(2), (prompts, k)) for k in (1, n))
                lengths = (np.exp(known + unknown - sigma**2 / 2) * mean).clip(1, most).round()  # [prompts, n]
                now = [list(range(replica, prompts, REPLICAS)) for replica in range(REPLICAS)]
                slowest = [
                    max(seconds(lengths[share], *model) for share in way)
                    for way in (now, by_expected(np.exp(known[:, 0])))
                ]
                totals += [*slowest, seconds(lengths, *model, ranks=REPLICAS)]
            now, expected, even = totals / STEPS
            print(
                f"{name}, {prompts} x {n} of {mean} tokens, at most {most}: {now:.2f} s; by expected length "
                f"{1 - expected / now:.1%} less, all replicas even {1 - even / now:.1%}"
            )


if __name__ == "__main__":
    main()
