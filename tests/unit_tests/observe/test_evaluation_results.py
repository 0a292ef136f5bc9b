"""The file of an evaluation: JSON whatever the data's messages hold, so that no evaluation ends a run."""

import json
from datetime import datetime

from tests.parts.observability import group, sample
from torchtitan_rl.observe.evaluation_results import failures_of, print_results, write_results


def test_wrong_answers_are_written_whatever_their_messages_hold(tmp_path, capsys):
    asked = [{"role": "user", "content": "When? 👩‍💻", "timestamp": datetime(2026, 1, 2)}]
    wrong = group(0, sample(0, 0.0, correct=False), messages=asked, expected_answer="\ud800")
    results = {"metrics": {"evaluation/accuracy": 0.0}, "failures": {"evaluation": failures_of([wrong])}}
    write_results(tmp_path, 4, results)
    stored = json.loads((tmp_path / "step-4.json").read_text("utf-8"))["failures"]["evaluation"]
    assert [failure["expected_answer"] for failure in stored] == ["\ud800"]
    assert stored[0]["messages"] == [{"role": "user", "content": "When? 👩‍💻", "timestamp": "2026-01-02 00:00:00"}]
    print_results(tmp_path, 4)
    assert "When?" in capsys.readouterr().out


def test_a_loss_that_is_not_finite_is_null(tmp_path, capsys):
    write_results(tmp_path, 4, {"metrics": {"evaluation/loss": float("nan")}, "failures": {}})
    assert json.loads((tmp_path / "step-4.json").read_text(), parse_constant=int)["metrics"] == {
        "evaluation/loss": None
    }
    print_results(tmp_path, 4)
    assert "loss=-" in capsys.readouterr().out
