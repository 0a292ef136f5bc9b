"""docs/tutorial.md: its data, its rewards and what it says is told; its commands are tested with the README's."""

import json
import re
from pathlib import Path

import pytest

from scripts.make_arrivals import rows
from tests.parts.grading import build_grader, drained, score
from torchtitan_rl.command.registry import load_config
from torchtitan_rl.configs.toys.answer_recipes import arrivals
from torchtitan_rl.types import Prompt

PAGE = (Path(__file__).parents[3] / "docs" / "tutorial.md").read_text()


@pytest.fixture
def here(files, monkeypatch):
    """A folder with the page's Python and JSON files, and no cache but its own."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", files / "cache")
    [mine] = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (files / "mine.jsonl").write_text(mine)
    (files / "arrivals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(2000, 0)))


def config_on(path: str):
    config = load_config("debug_rows")
    config.task.path = path
    return config


def test_warm_start_has_the_documented_format_and_habit(here):
    task = config_on("arrivals.jsonl").task.build()
    shown = re.findall(r"`([^`]*<answer>[^`]*)`", PAGE)
    assert shown
    for completion in shown:
        assert task.extract_answer(completion) is not None
    assert arrivals().chat


def test_documented_reward_receives_its_column_and_logs(here):
    config = config_on("arrivals.jsonl")
    config.grader.rewards, config.grader.weights = ["tutorial_rewards.py:short"], {"short": 0.2}
    task = config.task.build()
    [example] = task.held_out_examples(1)
    prompt = Prompt(
        prompt_idx=0, text="?", token_ids=[1], expected_answer=example.expected_answer, columns=example.columns
    )
    text = f"<answer>{example.expected_answer}</answer>"
    grader = build_grader(config.grader, task)
    [sample] = score(grader, text, prompt=prompt)
    assert sample.reward == pytest.approx(1.0 - 0.2 * len(text) / 60)
    assert sample.extra == {"short/characters": len(text)}
    minutes = example.columns["minutes"]
    assert drained(grader)["extra/short/characters_a_minute"].value == pytest.approx(len(text) / minutes)
