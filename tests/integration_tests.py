"""Whole runs on every layout, judged by their results: metrics, parity and files.

    .venv/bin/python tests/integration_tests.py [--test_name NAME] [--ngpu 8] [--output_dir outputs/tests] [--list]

On a machine with GPUs the runs use them, and tests that need more ranks than it has are skipped; without, the same list runs
on up to 8 gloo ranks of the CPU. What must agree, and how closely, depends on the run's dtype.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
BFLOAT16_BOUNDS = {"mean": 0.02, "max": 1.0}
"""Largest sampler/logprob_diff of a step in bfloat16: two implementations round single tokens differently by tenths."""
SHORT = ["--num-steps", "3", "--evaluation.every", "0"]
ANY_FOLDER = [
    "--config", "qwen3", "--hf-assets-path", "{dir}/start", *SHORT, "--num-steps", "2", "--num-prompts-per-step", "8",
    "--sampling.n", "4", "--sampling.max-tokens", "24", "--evaluation.sampling.max-tokens", "24",
    "--generator.max-model-len", "512", "--generator.dtype", "float32",
    "--trainer.mixed-precision-param", "float32", "--trainer.logprob-gate.max-diff", "1e-3", "--weight-sync.max-diff", "1e-4",
    "--grader.rewards", "torchtitan_rl.grading.rewards:script(name='latin')",
]  # fmt: skip
"""Training whatever model is in the test's own folder `start`, in float32, on a reward that random text differs in."""
TP2 = ["--trainer.parallelism.tensor-parallel-degree", "2"]
PROBED = ["--checkpoint.interval", "2", "--weight-sync.check-interval", "1"]
"""A checkpoint right after a weight sync that was probed, as every fiftieth is."""


@dataclass
class OverrideDefinitions:
    """One test: the command lines it runs one after another, and what must be true of the run folder afterwards."""

    override_args: Sequence[Sequence[str]]
    """Arguments of each run; {dir} stands for the test's own folder."""
    test_descr: str
    test_name: str
    ngpu: int | Sequence[int] = 1
    """Ranks of each run; the last repeats."""
    checks: Sequence[Callable[[Path], None]] = ()
    """Called with the run folder after the last run; raise AssertionError."""
    program: str = "torchtitan_rl.train"
    exit_codes: Sequence[int] = field(default_factory=lambda: [0])
    """What each run must exit with; the last repeats."""
    expect_output: Sequence[str] = ()
    """Texts that the last run must print."""
    prepare: Callable[[Path], None] | None = None
    """Called with the test's folder before the first run."""


def metrics_of(folder: Path) -> dict[int, dict[str, float]]:
    """The run's metrics.jsonl by step; a step written twice is an error."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    by_step = {row["step"]: row for row in rows}
    assert len(by_step) == len(rows), f"a step was written twice: {[row['step'] for row in rows]}"
    return by_step


def steps_are(last: int, first: int = 1) -> Callable[[Path], None]:
    """Every step from `first` to `last` is in the metrics, with the numbers that any step has."""

    def check(folder: Path) -> None:
        metrics = metrics_of(folder)
        steps = [step for step in metrics if step > 0]
        assert steps == list(range(first, last + 1)), f"steps {steps}, expected {first} to {last}"
        for step in steps:
            for key in ("reward/mean", "loss/total", "optimizer/grad_norm", "time/generate", "time/train", "time/sync"):
                assert key in metrics[step], f"step {step} has no {key}"

    return check


def sampler_agrees(float32_bound: float = 1e-4) -> Callable[[Path], None]:
    """Trainer and sampler agree in every step: to `float32_bound` on each token, or in bfloat16 to its rounding."""

    def check(folder: Path) -> None:
        dtype = json.loads((folder / "config.json").read_text())["generator"]["dtype"]
        bounds = {"max": float32_bound} if dtype == "float32" else BFLOAT16_BOUNDS
        for part, bound in bounds.items():
            diffs = {step: row[f"sampler/logprob_diff/{part}"] for step, row in metrics_of(folder).items() if step > 0}
            assert diffs, f"no sampler/logprob_diff/{part} was recorded"
            assert max(diffs.values()) < bound, f"sampler/logprob_diff/{part} in {dtype}: {diffs}"

    return check


def accuracy_rises(least: float, to: float) -> Callable[[Path], None]:
    """Held-out accuracy ends at least `least` higher than it began, and at `to` or more."""

    def check(folder: Path) -> None:
        found = [row["evaluation/accuracy"] for row in metrics_of(folder).values() if "evaluation/accuracy" in row]
        assert len(found) >= 2, f"evaluations: {found}"
        assert found[-1] - found[0] >= least, f"accuracy went from {found[0]:.3f} to {found[-1]:.3f}"
        assert found[-1] >= to, f"accuracy ended at {found[-1]:.3f}"

    return check


def records(*keys: str) -> Callable[[Path], None]:
    """Every training step has these metrics."""

    def check(folder: Path) -> None:
        for step, row in metrics_of(folder).items():
            missing = [key for key in keys if key not in row]
            assert step == 0 or not missing, f"step {step} has no {missing}"

    return check


def optimizer_goes_on(folder: Path) -> None:
    """Only the first step of all has Adam's largest stride, each weight by the learning rate: its moments were restored."""
    strides = {
        step: row["optimizer/update_ratio"] / row["optimizer/learning_rate"]
        for step, row in metrics_of(folder).items()
        if step > 0
    }
    assert all(strides[step] < 0.9 * strides[1] for step in strides if step > 1), strides


def resumed_as_if_never_stopped(folder: Path) -> None:
    """The last step of a run that was resumed and of one that never stopped have the same numbers, to the last bit."""
    found = [metrics_of(folder / name)[4] for name in ("straight", "resumed")]
    kept = [
        {key: value for key, value in row.items() if key.split("/")[0] in ("reward", "loss", "completions", "evaluation", "conversations")
         and "seconds" not in key and "share" not in key}
        for row in found
    ]  # fmt: skip
    assert len(kept[0]) > 20, found[0]
    assert kept[0]["conversations/turns/max"] > 1, kept[0]
    differing = {key: [row.get(key) for row in kept] for key in kept[0] if kept[0][key] != kept[1].get(key)}
    assert not differing, differing


def files_exist(*names: str) -> Callable[[Path], None]:
    """Each name (a glob) is there and not empty."""

    def check(folder: Path) -> None:
        for name in names:
            found = [p for p in folder.glob(name) if p.stat().st_size]
            assert found, f"no {name} in {sorted(p.name for p in folder.iterdir())}"

    return check


def parity_holds(folder: Path) -> None:
    """tests/parity.py, which knows each dtype's bounds, wrote its differences and found none too large."""
    found = json.loads((folder / "parity.json").read_text())
    assert found["failures"] == [], found
    assert len(found["sync_diffs"]) == 3, found


def exported_model_equals_policy(folder: Path) -> None:
    """The exported folder loads in transformers, and its greedy answers are as accurate as the run's last evaluation."""
    from tests.exported import greedy_accuracy

    exported = folder / "exported"
    command = ["scripts/export_hf.py", "--run", str(folder), "--output", str(exported), "--dtype", "float32"]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)
    last = metrics_of(folder)[max(metrics_of(folder))]["evaluation/accuracy"]
    found = greedy_accuracy(exported, num_prompts=256)
    assert abs(found - last) < 1e-9, f"exported {found}, policy {last}"


def odd_llama(folder: Path) -> None:
    """A random Llama 3 of odd dimensions in `start`, with untied embeddings."""
    settings = [
        "hidden_size=72",
        "num_attention_heads=6",
        "head_dim=32",
        "intermediate_size=100",
        "num_hidden_layers=3",
    ]
    settings += ["vocab_size=322", "tie_word_embeddings=false", "rms_norm_eps=1e-5"]
    command = ["scripts/make_random_checkpoint.py", "--architecture", "llama", "--dtype", "float32", "--set", *settings]
    subprocess.run(
        [sys.executable, *command, "--output", str(folder / "start")], cwd=ROOT, check=True, capture_output=True
    )


def export_is_whole(folder: Path) -> None:
    """transformers loads the exported folder with no tensor missing or left over, and the weights are no longer the start's."""
    from transformers import AutoModelForCausalLM

    exported = folder / "exported"
    command = ["scripts/export_hf.py", "--run", str(folder), "--output", str(exported), "--dtype", "float32"]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)
    model, info = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not (info["missing_keys"] | info["unexpected_keys"]), info
    start = AutoModelForCausalLM.from_pretrained(folder / "start")
    moved = [not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True)]
    assert all(moved), moved


def evaluation_is_reproduced(folder: Path) -> None:
    """scripts/evaluate.py gives, on two ranks, the very file that the run wrote on one after its last step."""
    last = max((folder / "evaluation").glob("step-*.json"), key=lambda file: int(file.stem.partition("-")[2]))
    command = ["scripts/evaluate.py", str(folder), "--nproc", "2", "--output", str(folder / "alone")]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (folder / "alone" / "evaluation" / "step-0.json").read_text() == last.read_text()


def run(*args: str) -> list[str]:
    """Arguments of one run in the test's folder."""
    return ["--dump-folder", "{dir}", *args]


def parity(*args: str) -> list[str]:
    """Arguments of tests/parity.py."""
    return ["--output", "{dir}/parity.json", *args]


def build_test_list() -> list[OverrideDefinitions]:
    """Every integration test, the shortest first."""
    checked_run = [steps_are(3), sampler_agrees(), files_exist("config.json", "environment.json", "tensorboard/*")]
    return [
        OverrideDefinitions(
            [parity()], "policy, transformers and engine agree in one process", "parity_1", 1, [parity_holds], "tests.parity"
        ),
        OverrideDefinitions(
            [parity("--dtype", "bfloat16")], "the same in bfloat16, to its rounding", "parity_bf16", 1, [parity_holds],
            "tests.parity",
        ),
        OverrideDefinitions(
            [["--dtype", dtype, "--generator-tp", tp] for dtype in ("float32", "bfloat16") for tp in ("1", "2")],
            "weights that did not arrive, in 7 ways: each caught at the first push with the tensor's name", "sabotage",
            [1, 2, 1, 2], [], "tests.sabotage",
        ),
        OverrideDefinitions(
            [parity("--tp", "2", "--untied")], "parity with TP 2, untied embeddings", "parity_tp2_untied", 2, [parity_holds],
            "tests.parity",
        ),
        OverrideDefinitions(
            [parity("--architecture", "llama", "--tp", "2", "--untied")], "parity of Llama 3 with its rope scaling, TP 2",
            "parity_llama", 2, [parity_holds], "tests.parity",
        ),
        OverrideDefinitions(
            [parity("--architecture", "qwen2", "--tp", "2", "--generator-tp", "2")],
            "parity of Qwen2.5 with its biases, TP 2 on both sides", "parity_qwen2", 2, [parity_holds], "tests.parity",
        ),
        OverrideDefinitions(
            [parity("--tp", "2", "--generator-tp", "2")], "parity with FSDP 2 x TP 2 and generator TP 2",
            "parity_fsdp2_tp2_gen2", 4, [parity_holds], "tests.parity",
        ),
        OverrideDefinitions(
            [parity("--replicate", "2", "--generator-tp", "2")], "parity with HSDP 2 x 2 and generator TP 2",
            "parity_hsdp_gen2", 4, [parity_holds], "tests.parity",
        ),
        OverrideDefinitions(
            [["--save", "{dir}/one.pt"], ["--max-tokens", "40", "--compare", "{dir}/one.pt"], ["--compare", "{dir}/one.pt"],
             ["--tp", "2", "--max-tokens", "64", "--compare", "{dir}/one.pt"],
             ["--replicate", "2", "--compare", "{dir}/one.pt"]],
            "every objective's loss, gradient and update on 1, 2 and 4 ranks, TP 1 and 2, HSDP, in one and many micro-batches",
            "invariance", [1, 1, 2, 4, 2], [], "tests.invariance",
        ),
        OverrideDefinitions(
            [run("--config", "debug")], "the README's run: accuracy rises", "debug", 1,
            [steps_are(50), sampler_agrees(1e-3), accuracy_rises(0.30, 0.90), exported_model_equals_policy,
             evaluation_is_reproduced],
        ),
        OverrideDefinitions(
            [run("--config", "debug_bf16", *SHORT, "--num-steps", "4")], "training in bfloat16", "debug_bf16", 1,
            [steps_are(4), sampler_agrees()],
        ),
        OverrideDefinitions(
            [
                run("--config", "debug", *SHORT, "--num-steps", "2", "--checkpoint.interval", "1"),
                run("--config", "debug", *SHORT, "--num-steps", "4", "--trainer.optimizer.lr", "1e39"),
                run("--config", "debug", *SHORT, "--num-steps", "4"),
            ],
            "NaN ends the run before a checkpoint holds it, and the last good one goes on",
            "nan",
            1,
            [steps_are(4), sampler_agrees()],
            exit_codes=[0, 3, 0],
        ),
        OverrideDefinitions(
            [run("--config", "debug", *SHORT, "--checkpoint.interval", "2"),
             run("--config", "debug", *SHORT, "--num-steps", "5")],
            "a run resumes at the next step, once", "resume", 1, [steps_are(5), sampler_agrees()],
        ),
        OverrideDefinitions(
            [run("--config", "tests/mixture.py:two_tasks", *SHORT, "--num-steps", "2", "--checkpoint.interval", "1"),
             run("--config", "tests/mixture.py:two_tasks", *SHORT, "--num-steps", "4")],
            "a mixture of a file's rows and sums, each sampled and scored its own way, goes on on 2 ranks", "mixture", [1, 2],
            [steps_are(4), sampler_agrees(), records("train/rows/reward", "train/sums/accuracy", "optimizer/epoch")],
        ),
        OverrideDefinitions(
            [run("--config", "debug", *SHORT, "--num-steps", "2", *PROBED),
             run("--config", "debug", *SHORT, "--num-steps", "4", *PROBED),
             run("--config", "debug", *SHORT, "--num-steps", "6", *PROBED, *TP2)],
            "a run goes on under FSDP 2 and then under TP 2", "resume_layouts", [1, 2, 2],
            [steps_are(6), sampler_agrees(), optimizer_goes_on],
        ),
        OverrideDefinitions(
            [run(*ANY_FOLDER, "--checkpoint.interval", "1"), run(*ANY_FOLDER, "--num-steps", "3", *TP2)],
            "a Llama 3 of odd dimensions is trained from its folder alone, goes on under TP 2 and is exported",
            "any_folder", [1, 2], [steps_are(3), sampler_agrees(), export_is_whole], prepare=odd_llama,
        ),
        OverrideDefinitions(
            [["--config", "tests/talk.py:talk", "--num-steps", "4", "--dump-folder", "{dir}/straight"],
             ["--config", "tests/talk.py:talk", "--num-steps", "2", "--dump-folder", "{dir}/resumed"],
             ["--config", "tests/talk.py:talk", "--num-steps", "4", "--dump-folder", "{dir}/resumed"]],
            "conversations go on after a resume to the last bit", "conversations", 1, [resumed_as_if_never_stopped],
        ),
        OverrideDefinitions(
            [run("--config", "debug", "--sampling.n", "1")], "wrong input: one message and exit code 2", "wrong_input", 2,
            exit_codes=[2], expect_output=["error: sampling.n = 1: expected at least 2"],
        ),
        OverrideDefinitions(
            [run("--config", "debug", *SHORT, "--trainer.logprob-gate.max-diff", "1e-12")],
            "a sampler that is not the policy stops the run before an update", "gate", 2, exit_codes=[3],
            expect_output=["stopped: sampler/logprob_diff/max"],
        ),
        OverrideDefinitions(
            [run("--config", "debug_fsdp2", *SHORT)], "FSDP 2", "debug_fsdp2", 2, checked_run,
        ),
        OverrideDefinitions(
            [run("--config", "debug_fsdp2_tp2", *SHORT)], "FSDP 2 x TP 2, generator TP 2", "debug_fsdp2_tp2", 4, checked_run,
        ),
        OverrideDefinitions(
            [run("--config", "debug", *SHORT, "--num-steps", "2", "--trainer.parallelism.data-parallel-replicate-degree", "2",
                 "--trainer.parallelism.tensor-parallel-degree", "2")],
            "HSDP 2 x FSDP 2 x TP 2 with 8 engines", "eight_ranks", 8, [steps_are(2), sampler_agrees()],
        ),
    ]  # fmt: skip


def launch(program: str, args: Sequence[str], ngpu: int, log: Path) -> int:
    """Run one command on `ngpu` ranks; its output goes to `log`. Returns the exit code."""
    command = [sys.executable, "-m", "torchtitan_rl.launch", "--standalone", f"--nproc_per_node={ngpu}"]
    command += ["-m", program, *args]
    threads = str(max(1, (os.cpu_count() or 1) // ngpu))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1"}
    with log.open("a") as stream:
        return subprocess.run(command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, env=environment).returncode


def ranks_of(test: OverrideDefinitions) -> list[int]:
    """How many ranks each run of the test has."""
    given = [test.ngpu] if isinstance(test.ngpu, int) else list(test.ngpu)
    return given + given[-1:] * (len(test.override_args) - len(given))


def run_test(test: OverrideDefinitions, output_dir: Path) -> str | None:
    """Run and check one test. Returns what was wrong, or None."""
    folder = output_dir / test.test_name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if test.prepare:
        test.prepare(folder)
    log = output_dir / f"{test.test_name}.log"
    log.unlink(missing_ok=True)
    for i, args in enumerate(test.override_args):
        expected = test.exit_codes[min(i, len(test.exit_codes) - 1)]
        code = launch(test.program, [arg.replace("{dir}", str(folder)) for arg in args], ranks_of(test)[i], log)
        if code != expected:
            end = "\n".join(log.read_text().splitlines()[-30:])
            return f"run {i + 1} exited with {code}, expected {expected}; the end of {log}:\n{end}"
    try:
        for text in test.expect_output:
            assert text in log.read_text(), f"{text!r} is not in {log}"
        for check in test.checks:
            check(folder)
    except AssertionError as error:
        return f"{error} (log: {log})"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--test_name", default="all", help="one test, or all")
    parser.add_argument(
        "--ngpu", type=int, default=torch.cuda.device_count() or 8, help="skip tests that need more ranks"
    )
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs" / "tests")
    parser.add_argument("--list", action="store_true", help="print the tests and exit")
    args = parser.parse_args()
    tests = build_test_list()
    if args.list:
        print("\n".join(f"{t.test_name:24} {max(ranks_of(t))} ranks  {t.test_descr}" for t in tests))
        return
    chosen = [t for t in tests if args.test_name in ("all", t.test_name)]
    if not chosen:
        parser.error(f"--test_name {args.test_name}: not one of {', '.join(t.test_name for t in tests)}")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    failed = skipped = 0
    for test in chosen:
        ranks = max(ranks_of(test))
        if ranks > args.ngpu:
            skipped += 1
            print(f"SKIP {test.test_name}: needs {ranks} ranks, --ngpu is {args.ngpu}", flush=True)
            continue
        print(f"RUN  {test.test_name} on {ranks} ranks: {test.test_descr}", flush=True)
        begin = time.monotonic()
        problem = run_test(test, args.output_dir)
        failed += problem is not None
        print(f"{'FAIL' if problem else 'PASS'} {test.test_name} in {time.monotonic() - begin:.0f} s", flush=True)
        if problem:
            print(problem, flush=True)
    print(f"{len(chosen) - failed - skipped} passed, {failed} failed, {skipped} skipped", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
