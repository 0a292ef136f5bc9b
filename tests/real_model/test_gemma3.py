"""Gemma 3 270M, a base model without a chat template and with 262,144 words: it trains on sums that follow three examples."""

import json
import re
from itertools import product

import pytest

from tests.fault_injection.harness import ROOT, metrics_of, train
from tests.integration.run_checks import sampler_agrees
from tests.real_model import packaged
from torchtitan_rl import device  # noqa: F401
from torchtitan_rl.data.tasks import completion_text

EXAMPLES = "12 + 25 = 37\n41 + 33 = 74\n58 + 16 = 74\n"
REAL = [
    "--config", "rows", "--hf-assets-path", "pypi:gemma3-270m", "--task.answer-kind", "number", "--prompts.no-apply-chat-template",
    "--sampling.stop", "\n", "--sampling.max-tokens", "12", "--evaluation.every", "0",
    "--num-prompts-per-step", "4", "--sampling.n", "4", "--generator.max-model-len", "640", "--trainer.optimizer.lr", "1e-6",
    "--trainer.lr-scheduler.warmup-steps", "0", "--metrics.sinks", "jsonl", "--metrics.no-report",
    "--grader.rewards", f"{__file__}:nearness",
]  # fmt: skip
"""The first push's probe is longer than the windows of 512."""


def nearness(completions, answer, **_):
    """0 for the right number, down to -1 for one that is 100 or more off, or for none. Most sums are wrong at first."""
    numbers = [re.search(r"\d+", completion_text(completion)) for completion in completions]
    return [-min(abs(int(n[0]) - right), 100) / 100 if n else -1.0 for n, right in zip(numbers, answer, strict=True)]


@pytest.mark.parametrize(("dtype", "steps"), [("bfloat16", 20), ("float32", 4)])
def test_base_model_trains(dtype, steps, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    packaged("pypi:gemma3-270m")
    rows = [{"prompt": f"{EXAMPLES}{a} + {b} =", "answer": a + b} for a, b in product(range(10, 100, 5), repeat=2)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = ["--task.path", str(tmp_path / "sums.jsonl"), "--num-steps", str(steps)]
    args += ["--generator.dtype", dtype, "--trainer.mixed-precision-param", dtype]
    ended = train(tmp_path, *args, base=REAL, timeout_s=1800)
    assert ended.code == 0, ended.output
    metrics = metrics_of(tmp_path / "run")
    updated = [step for step in range(1, steps + 1) if metrics[step]["optimizer/grad_norm"] > 0]
    assert len(updated) >= 0.75 * steps, updated  # in some steps all completions of each prompt are alike
    sampler_agrees(bfloat16_mean=0.06)(tmp_path / "run")  # 0.002 to 0.028 were measured
