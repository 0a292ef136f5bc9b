"""A step whose rewards wait, in worker processes: begun as groups end, against begun when all is sampled, in turn in one process.

    .venv/bin/python scripts/bench/rewards.py
    .venv/bin/python scripts/bench/rewards.py --new-tokens 128

debug's shape and random weights, the same 16 prompts with 8 completions in every step. Each prompt's completions are of one length,
1/8 to all of --new-tokens, drawn evenly, so that groups end at different times.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the launcher sets it, before torch is imported
from torchtitan_rl.core import device  # noqa: E402, F401  (before torchtitan and vLLM)

# isort: split
import torch  # noqa: E402

from scripts.bench.measure import machine_line  # noqa: E402
from scripts.bench.side_ours import config_of, start  # noqa: E402
from scripts.bench.step_vs_trl import checkpoint  # noqa: E402
from torchtitan_rl.core.controller import Controller  # noqa: E402
from torchtitan_rl.core.grading import Grader, TrainerState  # noqa: E402
from torchtitan_rl.core.grading.grader import GradingRound  # noqa: E402
from torchtitan_rl.core.types import Completion, Group, ScoredCompletion  # noqa: E402


def waits(completions, trainer_state, operands, **_):
    """0.05 to 0.2 s, always the same for a prompt, as a sandbox or a server would."""
    time.sleep(random.Random(str(operands[0])).uniform(0.05, 0.2))
    return [float(len(completion) % 3) for completion in completions]


class LateRound(GradingRound):
    """Begins when the scores are asked for."""

    def __init__(self, grader: Grader, state: TrainerState) -> None:
        super().__init__(grader, state)
        self._late: list[Group[Completion]] = []

    def begin(self, group: Group[Completion]) -> None:
        self._late.append(group)

    def scored_groups(self) -> list[Group[ScoredCompletion]]:
        for group in self._late:
            super().begin(group)
        return super().scored_groups()


def make_controller(new_tokens: int, workers: int) -> Controller:
    """debug's shape with the reward."""
    job = {
        "model": str(checkpoint("tiny")), "folder": tempfile.mkdtemp(), "prompts_per_step": 16, "n": 8,
        "new_tokens": new_tokens, "ours": {"compute": "float32", "tokens_at_once": 8192},
    }  # fmt: skip
    config = config_of(job)
    config.grader.rewards, config.grader.workers = [f"{Path(__file__).resolve()}:waits"], workers
    return start(config)


def fix_prompts(controller: Controller) -> None:
    """Gives every step the same prompts, each with its own completion length and no other end."""
    sampling, drawn = controller.config.sampling, random.Random(0)
    controller.generator.end_token_ids = []
    prompts = [
        replace(
            prompt, sampling=replace(sampling, max_tokens=drawn.randint(sampling.max_tokens // 8, sampling.max_tokens))
        )
        for prompt in controller.services.prompts.next_batch(controller.config.num_prompts_per_step)
    ]
    controller.services.prompts.next_batch = lambda num: prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new-tokens", type=int, default=32, help="of the longest completion")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="of each side")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    controller = make_controller(args.new_tokens, args.workers)
    fix_prompts(controller)
    recorder, values = controller.services.observer.recorder, {}
    flush = recorder.flush
    recorder.flush = lambda step: values.update(flush(step))
    ways = {"when all is sampled": LateRound, "as groups end": GradingRound}
    found: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for step in range(1, 2 * args.steps + 3):
        name = list(ways)[step % 2]
        controller.grader.round, controller.state.step = partial(ways[name], controller.grader), step
        controller._train_step()
        if step > 2:
            found[name].append(tuple(values[f"time/{part}"] for part in ("step", "generate", "grade", "train")))
    print(machine_line())
    for name, seconds in found.items():
        step, generate, grade, train = map(median, zip(*seconds, strict=True))
        print(f"{name}: step {step:.3f} s: generate {generate:.3f}, grade {grade:.3f}, train {train:.3f}")
    recorder.close()
    controller.close()


if __name__ == "__main__":
    main()
