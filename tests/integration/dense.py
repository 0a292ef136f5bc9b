"""Random updates against an independent float64 reference over dense rows: the loss and the gradient of each.

    .venv/bin/python -m tests.integration.dense --cases 6000            # the same cases every time
    .venv/bin/python -m tests.integration.dense --first 4711 --cases 1  # one case again

A case draws the objective (loss, advantages, credit, aggregation, correction, KL, entropy, truncation, zero variance, SEED-GRPO,
MaxEnt), the groups (rewards, turns, masks, lengths) and the layout (ranks, micro-batches, shared prompts, padding, mini-batches).
The project side is the trainer's own planning, packing and head and `Algorithm`; tests/parts/dense_update.py is the reference.
Exits non-zero if a gradient differs by more than 1e-5 of its largest element.
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from torchtitan_rl import device  # noqa: E402, F401  (before torchtitan)

# isort: split
from tests.parts.random_update import BOUND, differences, random_case  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=6000)
    parser.add_argument("--first", type=int, default=0, help="the first case's number, which is its seed")
    args = parser.parse_args()
    begin, drawn, updates, skipped, worst, wrong = time.monotonic(), Counter(), 0, 0, (0.0, 0), []
    for seed in range(args.first, args.first + args.cases):
        found = differences(seed)
        if found is None:
            skipped += 1
            continue
        updates += len(found)
        drawn.update(f"{name} {value}" for name, value in random_case(seed)[0]["settings"].items())
        largest = max((max(pair) for pair in found), default=0.0)
        worst = max(worst, (largest, seed))
        if largest > BOUND:
            wrong.append(seed)
            print(f"case {seed}: (loss, gradient) differ by {found}", flush=True)
    print(", ".join(f"{setting}: {count}" for setting, count in sorted(drawn.items())))
    seconds = time.monotonic() - begin
    print(
        f"{args.cases} cases, {updates} updates in {seconds:.0f} s; {skipped} too close to a bound of a clip or mask; largest "
        f"relative difference {worst[0]:.1e} (case {worst[1]}); {len(wrong)} beyond {BOUND:.0e}"
    )
    sys.exit(bool(wrong) or not updates)


if __name__ == "__main__":
    main()
