"""What only a GPU can show, the most important first. Prints what docs/gpu.md records.

    .venv/bin/python tests/gpu_first_day.py                              all parts
    .venv/bin/python tests/gpu_first_day.py --parts figures --limit 500  one part; what would not end in 500 s is skipped

Parts: `correctness` (parity, sabotage, learning, resume, with tests/integration_tests.py's own checks), `figures` (seconds, tokens/s
and memory of the published shapes with random weights), `trl` (the same step by TRL; needs `trl` beside this environment's vLLM).
It goes on after a failure. Logs and metrics are left in --output.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.integration.run_checks import metrics_of  # noqa: E402
from tests.integration_tests import OverrideDefinitions, build_test_list, launch, run_test  # noqa: E402

PARTS = ("correctness", "figures", "trl")
CORRECTNESS = {
    "parity_1": 130, "debug": 220, "parity_bf16": 110, "sabotage": 240, "debug_bf16": 150, "conversations": 300,
    "invariance_1": 90, "resume": 200, "nan": 300, "data_trl_rewards": 130,
}  # fmt: skip
"""Tests of one rank, with the seconds that each may take: an engine's first start of a shape takes 90."""
RANDOM = ROOT / "outputs/random"
SHORT = ["--evaluation.every", "0", "--metrics.console-every", "0", "--weight-sync.check-interval", "1"]
MADE_UP = "scripts/bench/made_up_reward.py:made_up"
"""Gives every completion an advantage, and so a backward, which a task's rewards of random text do not."""
WITHOUT_CHECKPOINT = [*SHORT, "--checkpoint.no-enable", "--num-steps", "4", "--grader.rewards", MADE_UP]


@dataclass(frozen=True)
class Variation:
    """A run of a published shape with random weights, whose completions have the full length."""

    name: str
    size: str
    args: Sequence[str] = ()
    seconds: int = 150
    """Skipped when less is left."""


VARIATIONS = (
    Variation("0.6B", "0.6B", seconds=160),
    Variation("0.6B with sleep", "0.6B", ["--generator.sleep", "True"]),
    Variation("0.6B, 512 sequences", "0.6B", ["--num-prompts-per-step", "64", "--generator.max-num-seqs", "512"]),
    Variation("0.6B compiled", "0.6B", ["--trainer.compile"]),
    Variation("0.6B, full activation checkpointing", "0.6B", ["--trainer.activation-checkpoint", "full"]),
    Variation("1.7B", "1.7B", seconds=200),
)
COLUMNS = {
    "step s": "time/step", "generate s": "time/generate", "train s": "time/train", "sync s": "time/sync",
    "generated tokens/s": "perf/generated_tokens_per_s", "trained tokens/s": "perf/trained_tokens_per_s", "MFU": "perf/mfu",
    "peak GiB": "perf/peak_memory_gib", "logprob diff mean": "sampler/logprob_diff/mean",
    "max": "sampler/logprob_diff/max",
}  # fmt: skip


class Report:
    """Lines for the user, also written to a file."""

    def __init__(self, file: Path, limit_s: float, only: Sequence[str]) -> None:
        self._file, self._only = file, only
        self._ends = time.monotonic() + limit_s
        self.failed = 0

    def say(self, line: str) -> None:
        print(line, flush=True)
        with self._file.open("a") as stream:
            print(line, file=stream)

    def wants(self, name: str) -> bool:
        return not self._only or name in self._only

    def has_time(self, name: str, seconds: float) -> bool:
        """Whether a check of about `seconds` still fits; says so if not."""
        left = self._ends - time.monotonic()
        if left < seconds:
            self.say(f"SKIP {name}: {left:.0f} s are left, it takes about {seconds}")
        return left >= seconds

    def result(self, name: str, problem: str | None, seconds: float) -> None:
        self.failed += problem is not None
        self.say(f"{'FAIL' if problem else 'PASS'} {name} in {seconds:.0f} s")
        if problem:
            self.say(problem)


def gpu_line() -> str:
    """Returns the GPU, its driver and the commit."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    return f"{gpu}; commit {commit.strip() or 'unknown'}"


def check_correctness(report: Report, output: Path, cores: int) -> None:
    tests = {test.test_name: test for test in build_test_list()}
    for name, seconds in CORRECTNESS.items():
        if report.wants(name) and report.has_time(name, seconds):
            begin = time.monotonic()
            report.result(name, run_test(tests[name], output, cores), time.monotonic() - begin)
            for line in differences(tests[name], output):
                report.say(f"     {line}")


def differences(test: OverrideDefinitions, output: Path) -> list[str]:
    """What a test measured besides passing: parity's differences, a run's accuracy and sampler against policy."""
    folder = output / test.test_name
    found = []
    if (folder / "parity.json").exists():
        found.append((folder / "parity.json").read_text())
    if (folder / "metrics.jsonl").exists():
        rows = metrics_of(folder)
        accuracy = [row["evaluation/accuracy"] for row in rows.values() if "evaluation/accuracy" in row]
        if accuracy:
            found.append(f"accuracy {' -> '.join(f'{value:.3f}' for value in accuracy)}")
        trained = [row for step, row in rows.items() if step > 1] or list(rows.values())
        found.append(f"means: {row_of(trained)}")
    return found


def row_of(rows: Sequence[dict[str, float]]) -> str:
    """Means over steps as cells of a table."""
    cells = []
    for title, key in COLUMNS.items():
        values = [row[key] for row in rows if key in row]
        cells.append(f"{title} {mean(values):.4g}" if values else f"{title} -")
    return ", ".join(cells)


def random_checkpoint(size: str) -> Path:
    """A folder of random bfloat16 weights with a published shape."""
    folder = RANDOM / f"Qwen3-{size}"
    if not folder.exists():
        command = [sys.executable, "scripts/make_random_checkpoint.py", "--size", size, "--output", str(folder)]
        subprocess.run(command, cwd=ROOT, check=True)
    return folder


def measure_variations(report: Report, output: Path, cores: int) -> None:
    for variation in VARIATIONS:
        if not report.wants(variation.name) or not report.has_time(variation.name, variation.seconds):
            continue
        slug = variation.name.replace(" ", "_").replace(",", "")
        folder, log = output / slug, output / f"{slug}.log"
        config = f"qwen3_{variation.size.lower().replace('.', '_')}"
        args = [
            "--config",
            config,
            "--hf-assets-path",
            str(random_checkpoint(variation.size)),
            "--dump-folder",
            str(folder),
        ]
        begin = time.monotonic()
        code = launch("torchtitan_rl.train", [*args, *WITHOUT_CHECKPOINT, *variation.args], 1, log, cores, {})
        problem = "\n".join(log.read_text().splitlines()[-25:]) if code else None
        report.result(variation.name, problem, time.monotonic() - begin)
        if not code:
            report.say("     " + row_of([row for step, row in metrics_of(folder).items() if step > 1]))


def compare_with_trl(report: Report, limit_s: float) -> None:
    command = [sys.executable, "scripts/bench/step_vs_trl.py", "--model", "0.6b", "--prompts", "32", "--n", "8"]
    command += ["--new-tokens", "512", "--one-after-another", "--warm-up", "1", "--steps", "2", "--threads", "8"]
    command += ["--ours", "compute=bfloat16", "--trl", "compute=bfloat16", "sequences_at_once=8", "checkpointing=yes"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        report.result("TRL", f"not done in {limit_s:.0f} s", limit_s)
        return
    report.result("TRL", None if done.returncode == 0 else done.stderr[-3000:], 0)
    report.say(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="these tests and shapes alone")
    parser.add_argument("--limit", type=float, default=1200, help="seconds")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs/gpu_first_day")
    parser.add_argument("--cores", type=int, default=8, help="threads of each run")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    report = Report(args.output / "report.txt", args.limit, args.only)
    report.say(gpu_line())
    if "correctness" in args.parts:
        check_correctness(report, args.output, args.cores)
    if "figures" in args.parts:
        measure_variations(report, args.output, args.cores)
    if "trl" in args.parts and report.has_time("TRL", 300):
        compare_with_trl(report, args.limit)
    sys.exit(bool(report.failed))


if __name__ == "__main__":
    main()
