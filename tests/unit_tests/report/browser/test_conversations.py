"""Conversations in a browser: turns, calls, errors, advantages, and what differs between two of them."""

import json

import pytest

from tests.parts.report_page import at, clean, shown
from tests.parts.report_runs import write_run
from torchtitan_rl.report import write_report


def test_a_chat_is_shown_as_turns(browser, tmp_path):
    folder = write_run(tmp_path / "a", steps=1)
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "tool", "content": [1]},
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row | {"messages": messages}) + "\n" for row in rows))
    write_report([folder], tmp_path / "r.html")
    browser.open(at(tmp_path / "r.html", view="samples", open="train/1/0/0"))
    roles = browser.run("[...document.querySelectorAll('.role')].map(e => e.innerText)")
    assert roles == ["system", "user", "tool", "assistant"]


@pytest.mark.parametrize(("waited", "shown_as"), [(1.5, "1.5 s"), (0.00584, "6 ms"), (9.7e-5, "under 1 ms")])
def test_a_conversation_shows_its_turns_calls_errors_and_advantages(browser, tmp_path, waited, shown_as):
    folder = write_run(tmp_path / "a", steps=1)
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    said = [
        {"role": "assistant", "content": "call", "reward": -0.2, "advantage": 0.25, "logged": {"tool_calls": 1, "tool_errors": 1}},
        {"role": "tool", "name": "multiply", "content": "error: ValueError: no such number"},
        {"role": "assistant", "content": "the last word", "advantage": -0.5},
    ]  # fmt: skip
    messages = [{"role": "system", "content": "<tools>"}, {"role": "user", "content": "what was asked"}]
    rows[0] |= {
        "conversation": said,
        "messages": messages,
        "prompt": "<|im_start|>system",
        "environment_seconds": waited,
    }
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report([folder], tmp_path / "r.html")
    browser.open(at(tmp_path / "r.html", view="samples", q="no such number"))
    assert shown(browser) == [0]  # only the tool said it
    line = browser.run("document.querySelector('tr[data-row]').innerText")
    assert "what was asked" in line
    assert "the last word" in line
    cards = browser.run("[...document.querySelectorAll('.cards > div')].map(e => e.innerText.replace('\\n', ' '))")
    assert cards == ["turns 2", "tool calls 1", "tool errors 1", f"waiting {shown_as}"]
    turns = browser.run("[...document.querySelectorAll('.turn.assistant')].map(e => e.innerText)")
    assert "turn 1" in turns[0]
    assert "advantage 0.25" in turns[0]
    assert "advantage -0.5" in turns[1]
    assert browser.run("document.querySelectorAll('.turn.tool.error').length") == 1
    assert clean(browser), browser.errors


def test_conversations_are_compared_by_what_was_asked_and_said(browser, tmp_path):
    folders = []
    for name in ("a", "b"):
        folder = write_run(tmp_path / name, steps=1, prompts=1, siblings=2)
        rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        for row in rows:
            said = [
                {"role": "assistant", "content": "call"},
                {"role": "tool", "name": "multiply", "content": f"result {name}"},
            ]
            row |= {
                "prompt": "<|im_start|>system",
                "messages": [{"role": "user", "content": "what was asked"}],
                "conversation": said,
            }
        (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        folders.append(folder)
    write_report(folders, tmp_path / "r.html")
    browser.open(at(tmp_path / "r.html", view="compare"))
    assert "what was asked" in browser.run("document.querySelector('tr[data-outcome]').innerText")
    texts = browser.run("[...document.querySelectorAll('.pair .sibling .text')].map(e => e.innerText)")
    assert texts[0] == "assistant: call\ntool multiply: result a"
    assert browser.run("[...document.querySelectorAll('.pair mark')].map(e => e.innerText)") == ["b"]
    browser.open(at(tmp_path / "r.html", view="samples", open="train/1/0/0", tab="siblings"))
    assert "tool multiply: result a" in browser.run("document.querySelector('.siblings').innerText")
    assert clean(browser), browser.errors
