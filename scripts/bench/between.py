"""What a rank does between sampling and its update: rewards, advantages, micro-batches. Seconds of each, without a model.

    .venv/bin/python scripts/bench/between.py [--completions 1024] [--tokens 2048] [--ranks 8] [--repeats 5]

Rewards and micro-batches are shared out over --ranks, advantages are made on each. Gathering completions is `gather.py`, logging is
`observability.py`.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.bench.measure import machine_line, random_step  # noqa: E402

# isort: split
from dataclasses import replace  # noqa: E402

from configs.debug import debug  # noqa: E402
from torchtitan_rl.core.algorithm import Algorithm  # noqa: E402
from torchtitan_rl.core.algorithm.episodes import draft_episodes  # noqa: E402
from torchtitan_rl.core.trainer.minibatches import items_of, plan_microbatches  # noqa: E402
from torchtitan_rl.core.trainer.packing import pack  # noqa: E402
from torchtitan_rl.core.types import Group, Prompt  # noqa: E402
from torchtitan_rl.setup.build_grader import build_grader  # noqa: E402

GROUP_SIZE, PROMPT_TOKENS = 8, 256


def seconds(function: Callable[[], object], repeats: int) -> float:
    """Median, after one that is not counted."""
    taken = []
    for _ in range(1 + repeats):
        begin = time.perf_counter()
        function()
        taken.append(time.perf_counter() - begin)
    return median(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=2048, help="of each completion")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    groups = random_step(
        [args.tokens] * args.completions, prompt_tokens=PROMPT_TOKENS, group_size=GROUP_SIZE, vocabulary=150_000
    )
    config = debug()
    task, algorithm = config.task.build(), Algorithm.Config().build(max_completion_tokens=args.tokens)
    grader = build_grader(config.grader, task)
    text = " ".join(["47 + 85 = 132"] * (args.tokens // 4)) + " [ANSWER] 132"
    example = task.train_example(0, seed=0)

    def sampled(group: Group) -> Group:
        prompt = Prompt(
            prompt_idx=group.prompt.prompt_idx, text=example.text, token_ids=group.prompt.token_ids,
            expected_answer=example.expected_answer, columns=example.columns,
        )  # fmt: skip
        return Group(prompt=prompt, samples=[replace(episode.completion, text=text) for episode in group.samples])

    mine = [sampled(group) for group in groups[:: args.ranks]]
    scored = [Group(prompt=group.prompt, samples=[e.scored for e in group.samples]) for group in groups]

    def advantages() -> None:
        algorithm.credit.assign(draft_episodes(scored))

    def microbatches() -> None:
        items = items_of(groups, whole_groups=False)
        plan = plan_microbatches(items, num_ranks=args.ranks, max_tokens=16_384, attention_cost=1e-4)
        counts = algorithm.normalizers(groups)
        for members in plan[0]:
            pack(members, normalizers=counts, multiple=128)

    print(machine_line())
    print(f"{args.completions} completions of {args.tokens} tokens, one of {args.ranks} ranks; milliseconds")
    for name, part in (
        ("rewards", lambda: grader.grade(mine)),
        ("advantages", advantages),
        ("micro-batches", microbatches),
    ):
        print(f"{name:14s} {1e3 * seconds(part, args.repeats):8.1f}")


if __name__ == "__main__":
    main()
