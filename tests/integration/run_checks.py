"""What must be true of a run folder after a whole run: checks for tests/integration_tests.py; each raises AssertionError."""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from tests.parts.metric_pages import undocumented
from torchtitan_rl.observe.store import read_rows
from torchtitan_rl.run.safe_load import SafeReader, load

ROOT = Path(__file__).resolve().parents[2]


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


def sampler_agrees(float32_bound: float = 1e-4, bfloat16_mean: float = 0.02) -> Callable[[Path], None]:
    """Trainer and sampler agree in every step: to `float32_bound` on each token, or in bfloat16 to its rounding, which moves single
    tokens by tenths."""

    def check(folder: Path) -> None:
        dtype = json.loads((folder / "config.json").read_text())["generator"]["dtype"]
        bounds = {"max": float32_bound} if dtype == "float32" else {"mean": bfloat16_mean, "max": 1.0}
        for part, bound in bounds.items():
            diffs = {step: row[f"sampler/logprob_diff/{part}"] for step, row in metrics_of(folder).items() if step > 0}
            assert diffs, f"no sampler/logprob_diff/{part} was recorded"
            assert max(diffs.values()) < bound, f"sampler/logprob_diff/{part} in {dtype}: {diffs}"

    return check


def shown_tokens_are_compared(folder: Path) -> None:
    """Shown training rows have the same numbers of each sampled token, such as the trainer's difference, whichever rank trained them.
    Of those without an advantage some are not compared."""
    rows = [row for row in read_rows(folder) if row["split"] == "train" and row.get("in_loss") and row.get("tokens")]
    names = {name for row in rows for name, values in row["tokens"].items() if isinstance(values, list)}
    assert {"diff", "entropy"} <= names, f"columns of {len(rows)} rows: {names}"
    for row in rows:
        if row["logprob_diff_mean"] is None:
            assert row["advantage"] == 0, f"{row['episode_id']} was trained on and not compared"
            continue
        sampled = [logprob is not None for logprob in row["tokens"]["logprob"]]
        for name in names - {"text"}:
            found = [value is not None for value in row["tokens"].get(name, [])]
            assert found == sampled, f"{row['episode_id']}: {name} of {sum(found)} tokens of {sum(sampled)}"


def accuracy_rises(least: float, to: float) -> Callable[[Path], None]:
    """Held-out accuracy ends at least `least` higher than it began, and at `to` or more."""

    def check(folder: Path) -> None:
        found = [row["evaluation/accuracy"] for row in metrics_of(folder).values() if "evaluation/accuracy" in row]
        assert len(found) >= 2, f"evaluations: {found}"
        assert found[-1] - found[0] >= least, f"accuracy went from {found[0]:.3f} to {found[-1]:.3f}"
        assert found[-1] >= to, f"accuracy ended at {found[-1]:.3f}"

    return check


def reward_rises(least: float) -> Callable[[Path], None]:
    """The last step's mean reward is at least `least` above the first's."""

    def check(folder: Path) -> None:
        found = [row["reward/mean"] for row in metrics_of(folder).values() if "reward/mean" in row]
        assert found[-1] - found[0] >= least, f"rewards: {found}"

    return check


def ended_after_the_best(later: int) -> Callable[[Path], None]:
    """The run ended `later` steps after its best evaluation, whose checkpoint is kept beside the last."""

    def check(folder: Path) -> None:
        rows = metrics_of(folder)
        found = {step: row["evaluation/accuracy"] for step, row in rows.items() if "evaluation/accuracy" in row}
        best = max(found, key=lambda step: (found[step], -step))
        assert 0 < best == max(rows) - later, found
        assert json.loads((folder / "checkpoint" / "best.json").read_text()) == {"step": best}, found
        assert all((folder / "checkpoint" / f"step-{step}").is_dir() for step in (best, max(found)))

    return check


def records(*keys: str) -> Callable[[Path], None]:
    """Every training step has these metrics."""

    def check(folder: Path) -> None:
        for step, row in metrics_of(folder).items():
            missing = [key for key in keys if key not in row]
            assert step == 0 or not missing, f"step {step} has no {missing}"

    return check


def optimizer_goes_on(folder: Path) -> None:
    """The newest checkpoint's moments have seen every step of all runs in the folder: they were restored."""
    newest = max((folder / "checkpoint").glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    stored = SafeReader(str(newest)).read_metadata().state_dict_metadata
    steps = {name: torch.zeros(()) for name in stored if name.startswith("optimizer.state.") and name.endswith(".step")}
    load(steps, newest, no_dist=True)
    assert {float(step) for step in steps.values()} == {float(max(metrics_of(folder)))}


def same_step(
    step: int, *names: str, above: Mapping[str, float] | None = None, rel: float = 0
) -> Callable[[Path], None]:
    """Two runs in the folder have the same numbers in this step, to the last bit.

    Args:
        above: metrics that show that the run did what is tested, and values that they must exceed.
        rel: how far the numbers may be apart, as a share of each, because the layout is another; those near 0 by a tenth of it.
    """
    parts = ("reward", "loss", "optimizer", "completions", "evaluation", "conversations")
    parts += ("in_flight", "sync", "teacher", "moe")

    def check(folder: Path) -> None:
        found = [metrics_of(folder / name)[step] for name in names]
        kept = [
            {key: value for key, value in row.items() if key.split("/")[0] in parts and "seconds" not in key and "share" not in key}
            for row in found
        ]  # fmt: skip
        assert len(kept[0]) > 20, found[0]
        for key, least in {"optimizer/grad_norm": 0, **(above or {})}.items():
            assert kept[0][key] > least, (key, kept[0])
        pairs = {key: [row.get(key) for row in kept] for key in kept[0]}
        if rel:
            del pairs["optimizer/tokens_seen"]  # each rank computes a prompt of its own samples once
        differing = {
            key: pair
            for key, pair in pairs.items()
            if pair[0] != pair[1] and (None in pair or not math.isclose(*pair, rel_tol=rel, abs_tol=rel / 10))
        }
        assert not differing, differing

    return check


def files_exist(*names: str) -> Callable[[Path], None]:
    """Each name (a glob) is there and not empty."""

    def check(folder: Path) -> None:
        for name in names:
            found = [p for p in folder.glob(name) if p.stat().st_size]
            assert found, f"no {name} in {sorted(p.name for p in folder.iterdir())}"

    return check


def exported_adapter_names_its_base(name: str) -> Callable[[Path], None]:
    """The exported adapter names its base by a path that holds from any folder."""

    def check(folder: Path) -> None:
        adapter = _exported(folder / name)
        base = Path(json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"])
        assert base.is_absolute()
        assert (base / "config.json").is_file()

    return check


def metrics_are_documented(folder: Path) -> None:
    """Every key that a run in the folder has logged is in docs/metrics.md."""
    for file in folder.rglob("metrics.jsonl"):
        keys = {key for line in file.read_text().splitlines() for key in json.loads(line)}
        assert undocumented(keys) == [], file


def parity_holds(folder: Path) -> None:
    """tests/integration/parity.py, which knows each dtype's bounds, wrote its differences and found none too large."""
    found = json.loads((folder / "parity.json").read_text())
    assert found["failures"] == [], found
    assert len(found["sync_diffs"]) == 3, found


def _exported(folder: Path, *options: str) -> Path:
    """The run's policy, exported into its folder."""
    to = folder / "exported"
    command = ["-m", "torchtitan_rl.command.command", "export", str(folder), "--output", str(to), *options]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)
    return to


def exported_model_equals_policy(folder: Path) -> None:
    """The exported folder loads in transformers, and its greedy answers are as accurate as the run's last evaluation."""
    from tests.parts.exported import greedy_accuracy

    exported = _exported(folder, "--dtype", "float32")
    last = metrics_of(folder)[max(metrics_of(folder))]["evaluation/accuracy"]
    found = greedy_accuracy(exported, num_prompts=256)
    assert abs(found - last) < 1e-9, f"exported {found}, policy {last}"


def export_is_whole(folder: Path) -> None:
    """transformers loads the exported folder with no tensor missing or left over, and the weights are no longer the start's."""
    from transformers import AutoModelForCausalLM

    exported = _exported(folder, "--dtype", "float32")
    model, info = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not (info["missing_keys"] | info["unexpected_keys"]), info
    start = AutoModelForCausalLM.from_pretrained(json.loads((folder / "config.json").read_text())["hf_assets_path"])
    moved = [not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True)]
    assert all(moved), moved


@torch.no_grad()
def sampled_as_transformers(folder: Path) -> None:
    """The sampler's log-probabilities of the first step, of which tests/parts/even_ids.py keeps tokens and values, are transformers'."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = json.loads((folder / "config.json").read_text())
    start, dtype = config["hf_assets_path"], config["generator"]["dtype"]
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32),
        AutoTokenizer.from_pretrained(start),
    )
    diffs = []
    for row in (row for row in read_rows(folder) if row["step"] == 1):
        prompt, completion = tokenizer(row["prompt"])["input_ids"], row["extra/even/ids"]
        assert len(prompt) == row["prompt_tokens"], row["prompt"]
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]  # [L, V]
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
        diffs.append((logprobs - torch.tensor(row["extra/even/logprobs"])).abs())
    diff = torch.cat(diffs)  # [sampled tokens]
    assert len(diff) > 100, f"only {len(diff)} tokens were shown"
    most = {"float32": 1e-4, "bfloat16": 0.02}[dtype]
    assert diff.mean() < most, f"{dtype}: mean {diff.mean():.1e}, largest {diff.max():.1e}"


def evaluation_is_reproduced(folder: Path) -> None:
    """The fork `alone`, which only evaluates, gave the very file that the run wrote after its last step."""
    last = max((folder / "evaluation").glob("step-*.json"), key=lambda file: int(file.stem.partition("-")[2]))
    assert (folder / "alone" / "evaluation" / "alone" / last.name).read_text() == last.read_text()
