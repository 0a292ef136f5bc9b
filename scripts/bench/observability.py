"""What observability costs the training thread: 1,024 episodes of 2,048 tokens a step, 6,400 scalars of micro-batches and two
distributions over 2 million tokens, every sink on.

    python scripts/bench/observability.py [--episodes 1024] [--tokens 2048] [--steps 8] [--sinks console jsonl ...]

Prints the milliseconds that each part takes on the training thread, by the clock and of the thread's own processor time; the
limit of 150 ms, half a percent of a 30 s step, is on the latter. By the clock, the thread also waits for other processes and
for the sinks' threads. W&B runs offline; everything is written to a temporary folder.
"""

import argparse
import contextlib
import io
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from torchtitan_rl.core import device  # noqa: E402, F401  (before torchtitan)

# isort: split
import numpy as np  # noqa: E402

LIMIT_MS = 150.0


def main() -> int:
    """Runs the bench; returns 1 when the median step costs more than the limit."""
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="bench-observability-"))
    os.environ["TRACKIO_DIR"] = str(folder / "trackio")
    os.environ["WANDB_SILENT"] = "true"
    groups = _groups(options.episodes, options.tokens)
    with contextlib.redirect_stdout(io.StringIO()):
        clock, processor, dropped = _measure(options, folder, groups)
    print(f"{options.episodes} episodes of {options.tokens} tokens, {options.steps} steps, {' '.join(options.sinks)}")
    for part, taken in clock.items():
        own = statistics.median(processor[part])
        print(f"  {part:<30} processor {own:6.1f} ms   clock {statistics.median(taken):7.1f}   most {max(taken):7.1f}")
    total = statistics.median(processor["training thread, total"])
    share = f"{total / 300:.2f} % of a 30 s step"
    print(f"  {total:.1f} ms of processor time is {share}; limit {LIMIT_MS:.0f} ms; rows dropped: {dropped:.0f}")
    print(f"  written: {sum(f.stat().st_size for f in folder.rglob('*') if f.is_file()) / 2**20:.1f} MiB in {folder}")
    return int(total > LIMIT_MS)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pause", type=float, default=2.0, help="seconds that training takes between two flushes")
    parser.add_argument("--keep-all-rows", action="store_true")
    parser.add_argument("--sinks", nargs="+", default=["console", "jsonl", "tensorboard", "wandb", "trackio"])
    return parser.parse_args()


def _groups(count: int, tokens: int) -> list:
    """`count` episodes in groups of 16."""
    from torchtitan_rl.core.types import Completion, Credit, Episode, Group, Prompt, ScoredCompletion

    chance = random.Random(0)
    numbers = np.random.default_rng(0)
    words = [f"word{i} " for i in range(5000)]

    def episode(sample_idx: int) -> Episode:
        reward = chance.choice([0.0, 1.0])
        completion = Completion(
            sample_idx=sample_idx,
            policy_version=0,
            token_ids=numbers.integers(0, 150_000, tokens),
            sampler_logprobs=-numbers.random(tokens),
            text="".join(chance.choices(words, k=tokens)),
            finish_reason="stop",
        )
        scored = ScoredCompletion(
            completion=completion,
            reward=reward,
            reward_breakdown={"correct": reward, "format": 0.2},
            extra={"extracted": "42"},
            answer="42" if reward else None,
            correct=reward > 0,
        )
        return Episode(scored=scored, credit=Credit(advantage=reward - 0.5))

    def group(prompt_idx: int) -> Group:
        prompt = Prompt(
            prompt_idx=prompt_idx,
            text="What is the sum of these numbers? " * 20,
            token_ids=numbers.integers(0, 150_000, 200),
            expected_answer="42",
        )
        return Group(prompt=prompt, samples=[episode(i) for i in range(16)])

    return [group(i) for i in range(count // 16)]


def _measure(options: argparse.Namespace, folder: Path, groups: list) -> tuple[dict, dict, float]:
    """Milliseconds of each part in each step, by the clock and of the thread's own processor time; rows dropped."""
    from torchtitan_rl import observability as obs
    from torchtitan_rl.core.algorithm import Algorithm
    from torchtitan_rl.observability.metrics.efficiency import Footprint, TokenFlops
    from torchtitan_rl.observability.metrics.step import record_step

    update = SimpleNamespace(
        grad_norm=0.5, clipped_fraction=0.0, learning_rate=1e-6, work=((1, 1, 1), (1, 1, 1)),
        rank_tokens=[1], trained_tokens=1, forward_only_tokens=0, packed_tokens=1, padding_tokens=0, metrics=[],
    )  # fmt: skip
    algorithm = Algorithm.Config().build(max_completion_tokens=16)
    per_token = np.random.default_rng(0).random((128, 16_384))  # [micro-batch, tokens]
    config = obs.Recorder.Config(sinks=options.sinks, wandb_mode="offline", keep_all_rows=options.keep_all_rows)
    run = obs.Recorder(config, run_folder=folder, run_name="bench", run_config={"a": 1}, total_steps=options.steps)
    milliseconds: dict[str, list[float]] = defaultdict(list)
    processor: dict[str, list[float]] = defaultdict(list)
    dropped = 0.0

    @contextlib.contextmanager
    def part(name: str):
        started, own_started = time.perf_counter(), time.thread_time()
        yield
        processor[name].append(1e3 * (time.thread_time() - own_started))
        milliseconds[name].append(1e3 * (time.perf_counter() - started))

    for step in range(1, options.steps + 1):
        footprint = Footprint(
            weights=1,
            kv_per_token=1,
            pushed=1,
            ranks=1,
            engine_ranks=1,
            train_dtype="float32",
            engine_dtype="float32",
            flops=TokenFlops(1e9, 1, 1),
        )
        state = SimpleNamespace(step=step, optimizer_steps=step, prompts_seen=1, tokens_seen=1)
        with part("record_step"):
            record_step(groups, update, state=state, algorithm=algorithm, footprint=footprint, data={})
        with part("6,400 scalars of micro-batches"):
            for i in range(6400):
                obs.record_metric(f"scalar/{i % 50}", i)
        with part("2 distributions over tokens"):
            for values in per_token:
                obs.record_metric("sampler/logprob_diff", values, obs.Reduce.DISTRIBUTION)
                obs.record_metric("policy/token_entropy", values, obs.Reduce.DISTRIBUTION)
        with part("flush"):
            dropped = run.flush(step)["obs/dropped_rows"]
        time.sleep(options.pause)
    run.close()
    for taken in (milliseconds, processor):
        taken["training thread, total"] = [sum(parts) for parts in zip(*taken.values(), strict=True)]
    return milliseconds, processor, dropped


if __name__ == "__main__":
    sys.exit(main())
