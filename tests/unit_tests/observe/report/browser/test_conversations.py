"""Conversations in a browser: turns, calls, errors, advantages, and what differs between two of them."""

import pytest

from tests.parts.report_page import clean, open_samples, shown, text, texts

ALONE = {"steps": 1, "prompts": 1, "siblings": 1}
"""A run of one sample."""


@pytest.mark.parametrize(("waited", "shown_as"), [(1.5, "1.5 s"), (0.00584, "6 ms"), (9.7e-5, "under 1 ms")])
def test_a_conversation_shows_its_turns_calls_errors_and_advantages(browser, tmp_path, waited, shown_as):
    said = [
        {"role": "assistant", "content": "call", "reward": -0.2, "advantage": 0.25, "logged": {"tool_calls": 1, "tool_errors": 1}},
        {"role": "tool", "name": "multiply", "content": "error: ValueError: no such number"},
        {"role": "assistant", "content": "the last word", "advantage": -0.5},
    ]  # fmt: skip
    messages = [{"role": "system", "content": "<tools>"}, {"role": "user", "content": "what was asked"}]
    cells = {"conversation": said, "messages": messages, "prompt": "<|im_start|>system", "environment_seconds": waited}

    def changed(row):
        row.update(cells if row["episode_id"] == "train/1/0/0" else {})

    open_samples(browser, tmp_path, changed, run={"steps": 1}, q="no such number")
    assert shown(browser) == [0]  # only the tool said it
    line = text(browser, "tr[data-row]")
    assert "what was asked" in line
    assert "the last word" in line
    cards = browser.run("[...document.querySelectorAll('.cards > div')].map(e => e.innerText.replace('\\n', ' '))")
    assert cards == ["turns 2", "tool calls 1", "tool errors 1", f"waiting {shown_as}"]
    turns = texts(browser, ".turn.assistant")
    assert "turn 1" in turns[0]
    assert "advantage 0.25" in turns[0]
    assert "advantage -0.5" in turns[1]
    assert browser.run("document.querySelectorAll('.turn.tool.error').length") == 1
    assert clean(browser), browser.errors


def test_a_rollout_of_several_traces_says_where_each_begins_and_from_which_it_came(browser, tmp_path):
    said = [
        {"role": "assistant", "content": "12 + 33 = 45", "trace": 0},
        {"role": "assistant", "content": "45 + 7 = 52", "trace": 1},
        {"role": "assistant", "content": "done: 52", "trace": 0},
    ]
    traces = [
        {"parent": 0, "reason": "", "context": [], "context_tokens": 30, "tokens": 40},
        {"parent": 0, "reason": "message 2 changed", "context": [{"role": "user", "content": "so far: 45"}], "context_tokens": 18, "tokens": 12},
    ]  # fmt: skip
    open_samples(browser, tmp_path, {"conversation": said, "traces": traces}, run=ALONE, open="train/1/0/0")
    parts = texts(browser, ".body > :is(.assistant, .opening)")
    assert [part.split("\n")[0].strip() for part in parts] == [
        "assistant · turn 1 · trace 0",
        "trace 1 · from trace 0 · message 2 changed · 1 message, 18 tokens",
        "assistant · turn 2 · trace 1",
        "assistant · turn 3 · trace 0",
    ]
    lefts = browser.run("[...document.querySelectorAll('.body > :is(.assistant, .opening)')].map(e => e.offsetLeft)")
    assert lefts[0] == lefts[3] < lefts[1] == lefts[2]  # a tree: what came from a trace is further in
    browser.run("document.querySelector('.opening').open = true")
    assert "so far: 45" in text(browser, ".opening")
    assert "traces\n2" in text(browser, ".cards")
    assert clean(browser), browser.errors


def test_the_next_turn_and_the_next_error_are_one_key_away(browser, tmp_path):
    said = []
    for i in range(121):
        result = "error: no such number" if i % 4 == 2 else str(i)
        said += [{"role": "assistant", "content": f"call {i}"}, {"role": "tool", "name": "multiply", "content": result}]
    open_samples(browser, tmp_path, {"conversation": said}, run=ALONE, height=700, open="train/1/0/0")
    focused = "document.activeElement.closest('.turn').innerText"
    seen = "(r => r.top >= 0 && r.bottom <= innerHeight)(document.activeElement.getBoundingClientRect())"
    expected = ["call 0", "call 1", "error: no such number", "call 3", "error", "call 7"]
    for key, words in zip("nnenen", expected, strict=True):
        browser.press(key)
        assert words in browser.run(focused)
        assert browser.run(seen)
    assert clean(browser), browser.errors
