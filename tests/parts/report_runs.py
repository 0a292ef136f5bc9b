"""Folders of runs as training leaves them, made by hand: small, and with everything that can be odd."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    "<svg onload=window.hacked=3> &lt;b&gt; javascript:alert(1) \u2028\u2029 %%data%% \x1b[31m\x00 \u202egnp.exe \ud800 "
    "\u05e9\u05dc\u05d5\u05dd {{7*7}} ${window.hacked = 4}"
)
"""A response that tries to leave its place in every way that a page has."""


def write_run(
    folder: Path,
    *,
    steps: int = 12,
    prompts: int = 4,
    siblings: int = 4,
    seed: int = 0,
    text: str | None = None,
    **config: Any,
) -> Path:
    """A run whose reward rises and whose samples are all kept. `text`: the response of every sample of prompt 0."""
    chance = random.Random(seed)
    (folder / "logs").mkdir(parents=True)
    settings = {"config": "debug", "num_steps": steps, "seed": seed, "evaluation": {"num_prompts": prompts}, **config}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "environment.json").write_text(json.dumps({"device": "cpu", "packages": {"torch": "2.13.0"}}))
    lines = [metrics_of(step, steps, chance) for step in range(steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with open(folder / "samples.jsonl", "w") as file:
        for step in range(1, steps + 1):
            rows = [row_of(step, p, s, siblings, chance, text) for p in range(prompts) for s in range(siblings)]
            file.write("\n".join(map(json.dumps, rows)) + " \n")
    return folder


def write_evaluations(folder: Path) -> Path:
    """Adds what four held-out prompts were answered before training and after the last step: half of them learned. Returns the folder."""
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    with open(folder / "samples.jsonl", "a") as file:
        for step in (0, last):
            for prompt in range(4):
                right = prompt == 2 or (step == last and prompt < 2)
                row = row_of(step, prompt, 0, 1, random.Random(0), f"{prompt} and 1 make {prompt + right}")
                name = {"split": "eval_greedy", "table": "evaluation/samples"}
                name["episode_id"] = f"eval_greedy/{step}/{prompt}/0"
                judged = {"correct": right, "answer": str(prompt + right), "advantage": None}
                judged["expected_answer"] = str(prompt + 1)
                asked = {"prompt": f"What is {prompt} + 1?\n", "response": f"{prompt} and 1 make {prompt + right}"}
                file.write(json.dumps(row | name | judged | asked) + " \n")
    return folder


def change_rows(folder: Path, change: Callable[[dict[str, Any]], Any]) -> list[dict[str, Any]]:
    """Changes the rows of samples.jsonl, each in place, and returns them."""
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for row in rows:
        change(row)
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + " \n" for row in rows))
    return rows


def metrics_of(step: int, steps: int, chance: random.Random) -> dict[str, Any]:
    """One line of metrics.jsonl."""
    line: dict[str, Any] = {"step": step, "time": 1.7e9 + 2 * step}
    if step % 4 == 0:
        line["evaluation/accuracy"] = 0.25 + 0.5 * step / steps
    if not step:
        return line
    reward = 0.4 + 0.7 * step / steps + chance.gauss(0, 0.02)
    return line | {
        "reward/mean": reward, "reward/std": 0.3, "policy/entropy": 0.9 ** step, "loss/total": -0.01, "loss/policy": -0.01,
        "optimizer/grad_norm": 0.2, "optimizer/learning_rate": 1e-4, "sampler/logprob_diff/mean": 1e-7,
        "sampler/logprob_diff/max": 3e-5, "groups/zero_variance_fraction": 0.25, "completions/length/mean": 20.0 + step,
        "time/step": 2.0, "time/generate": 0.8, "time/train": 1.0, "perf/step_tokens_per_s": 900.0,
        "extra/mine/length": 3.0, "obs/dropped_rows": 0.0,
    }  # fmt: skip


def row_of(
    step: int, prompt: int, sample: int, siblings: int, chance: random.Random, text: str | None
) -> dict[str, Any]:
    """One line of samples.jsonl."""
    right = chance.random() < 0.5
    a, b = 10 * prompt + 3, step
    answer = a + b if right else a + b + 1
    response = text if text is not None and prompt == 0 else f"step by step: {a} and {b} make [ANSWER] {answer}"
    return {
        "step": step, "run_id": "00000000", "table": "rollout/samples", "episode_id": f"train/{step}/{prompt}/{sample}",
        "policy_version": step - 1, "staleness": 0, "split": "train", "prompt_idx": prompt, "sample_idx": sample,
        "group_size": siblings, "select_reason": "top" if (prompt, sample) == (1, 1) else "",
        "prompt": f"What is {a} + {b}?\n", "response": response, "expected_answer": str(a + b), "answer": str(answer),
        "correct": right, "reward": 1.2 if right else -0.8, "advantage": chance.gauss(0, 1),
        "in_loss": True, "left_out": None, "prompt_tokens": 9, "response_tokens": 18 + chance.randrange(10),
        "finish_reason": "length" if chance.random() < 0.2 else "stop", "logprob_mean": -0.1, "logprob_diff_mean": 1e-6,
        "logprob_diff_max": 1e-5, "reward/correct": 1.0 if right else -1.0, "reward/format": 0.2,
        "extra/steps": sample, "example/operands": [a, b],
    }  # fmt: skip
