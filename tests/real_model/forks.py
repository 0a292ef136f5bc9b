"""Forks trained runs again and again in one process: load, first push with its proof and probe, one step, second push.

    .venv/bin/python -m tests.real_model.forks RUN [RUN ...] --forks 200

Each fork has another held-out prompt as its probe, another seed and other prompts. Four in a row go on from each other, the next four
from the next of the runs' checkpoints. None must be stopped. The config is `smollm2` with steps of 2 prompts x 4 completions, or what --config and --hf-assets-path say.
"""

import argparse
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np

from torchtitan_rl import device  # noqa: F401  (before torchtitan)
from torchtitan_rl.build import build_run
from torchtitan_rl.comm import be_only_rank
from torchtitan_rl.command.registry import parse_args
from torchtitan_rl.controller import Controller
from torchtitan_rl.errors import TrainingStopped
from torchtitan_rl.run.checkpoint_folder import CheckpointFolder

SMALL = [
    "--num-prompts-per-step", "2", "--sampling.n", "4", "--evaluation.every", "100000", "--evaluation.num-prompts", "256",
    "--checkpoint.no-enable", "--num-steps", "1000000", "--metrics.sinks",
]  # fmt: skip


IN_A_ROW = 4
"""Forks of a checkpoint, each a step after the one before."""


def fork(controller: Controller, number: int) -> None:
    """Push as a new process does, take a step, push. Raises TrainingStopped for a false alarm."""
    controller.generator.seed = number
    controller.prompts.next_batch(number)  # the step has other prompts
    held_out = controller.held_out[number % len(controller.held_out)]
    sync = controller.weight_sync
    sync._num_pushes, sync._pushed, sync._proven = 0, None, None
    sync._probe = np.resize(held_out.token_ids, len(sync._probe))
    controller._begin()
    controller.state.step += 1
    controller._step()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--forks", type=int, default=200, help="(default: %(default)s)")
    args, config_words = parser.parse_known_args()
    checkpoints = [path for run in args.runs for path in CheckpointFolder(run).steps().values()]
    if not checkpoints:
        parser.error(f"no checkpoint in {', '.join(map(str, args.runs))}: name folders of runs")
    be_only_rank()
    _, config = parse_args([*SMALL, *(config_words or ["--config", "smollm2"])])
    alarms = 0
    with tempfile.TemporaryDirectory() as folder:
        controller = build_run(config, Path(folder))
        with closing(controller.generator), closing(controller.grader):
            for number in range(args.forks):
                began = time.monotonic()
                checkpoint = checkpoints[number // IN_A_ROW % len(checkpoints)]
                if number % IN_A_ROW == 0:
                    controller.checkpoints.load(checkpoint)
                try:
                    fork(controller, number)
                except TrainingStopped as alarm:
                    alarms += 1
                    print(f"ALARM {alarm}", flush=True)
                print(f"fork {number + 1} of {args.forks}: {checkpoint}, {time.monotonic() - began:.1f} s", flush=True)
    print(f"{args.forks} forks of {len(checkpoints)} checkpoints, {alarms} false alarms")
    return int(alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
