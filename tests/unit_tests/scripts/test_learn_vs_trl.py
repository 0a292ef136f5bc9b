"""scripts/bench/learn_vs_trl.py: its table is right, and TRL's side has our hyper-parameters and the task's rewards."""

import json
import random
import sys

from scripts import results
from scripts.bench import learn_vs_trl
from scripts.bench.counting_rewards import correct, well_formed
from torchtitan_rl.library.tasks.counting import Counting
from torchtitan_rl.setup.registry import parse_args

CURVES = {"grpo": [[0.1, 0.42, 0.44], [0.1, 0.3, 0.46]], "trl": [[0.1, 0.2, 0.41], [0.1, 0.2, 0.43]]}
"""Held-out accuracies of seeds 0 and 1 at steps 0, 5 and 10."""


def write_run(folder, accuracies, step_s, evaluation_s):
    """A run that is done. Its step's time contains an evaluation's, as in our runs."""
    folder.mkdir(parents=True)
    lines = [{"step": 0, "evaluation/accuracy": accuracies[0], "time/evaluate": 3.0}]
    for step in range(1, 5 * len(accuracies) - 4):
        due = step % 5 == 0
        evaluated = {"evaluation/accuracy": accuracies[step // 5], "time/evaluate": evaluation_s} if due else {}
        lines.append({"step": step, "time/step": step_s + evaluation_s * due, **evaluated})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "end.json").write_text(json.dumps({"outcome": "done"}))


def test_table_has_curves_with_intervals_and_seconds_without_evaluations(tmp_path, monkeypatch, capsys):
    for name, seeds in CURVES.items():
        for seed, accuracies in enumerate(seeds):
            write_run(tmp_path / name / f"seed-{seed}", accuracies, 4.0 if name == "trl" else 2.0, 7.0)
    monkeypatch.setattr(learn_vs_trl, "TARGET", 0.4)
    monkeypatch.setattr(
        sys, "argv", ["learn_vs_trl.py", "--table", "--output", str(tmp_path)]
    )  # the third seed is not there
    assert learn_vs_trl.main() == 0
    heads, _, ours, trl, _, difference, ratio = capsys.readouterr().out.splitlines()
    assert [cell.strip() for cell in heads.split("|")[2:7]] == [
        "seeds",
        "step 0",
        "step 5",
        "step 10",
        "seconds to 40%",
    ]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in (ours, trl)]
    assert cells[0] == [
        "ours",
        "2",
        "10.0 ± 0.0",
        "36.0 ± 76.2",
        "45.0 ± 12.7",
        "15.0 ± 63.5",
        "20.0 ± 0.0",
    ]  # t(1) 12.706
    assert cells[1] == ["TRL", "2", "10.0 ± 0.0", "20.0 ± 0.0", "42.0 ± 12.7", "40.0 ± 0.0", "40.0 ± 0.0"]
    assert difference == "Ours minus TRL at step 10, seed by seed: 3.0 ± 0.0 points."
    assert ratio == "TRL's steps take 2.00 ± 0.00 times as long."


def test_trl_gets_the_hyperparameters_of_the_cell(tmp_path):
    _, config = parse_args(results.command("grpo", 2, tmp_path / "run", None)[1:])
    found = learn_vs_trl.hyperparameters(config, 30)
    assert (found["seed"], found["max_steps"], found["learning_rate"], found["beta"]) == (2, 30, 1e-4, 0)
    assert (found["adam_beta1"], found["adam_beta2"], found["epsilon"], found["epsilon_high"]) == (0.9, 0.95, 0.2, 0.2)


def test_rewards_of_trls_side_are_the_tasks():
    task, rng = Counting.Config().build(), random.Random(0)
    pieces = ["[ANSWER]", "[ANSWER] 9", " ", "9", "+9", "09", "-9", "10", "9.5", "9,100", "9" * 19, "x"]
    texts = ["".join(rng.choices(pieces, k=rng.randint(0, 4))) for _ in range(2000)]
    expected = [rng.choice(["9", "10", "99"]) for _ in texts]
    assert correct(texts, expected) == task.correct(completions=texts, expected_answer=expected)
    assert well_formed(texts) == task.format(completions=texts)
    assert correct(texts, expected).count(1.0) > 50
