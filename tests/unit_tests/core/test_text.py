"""Known secrets are hidden in texts and in what holds texts."""

import pytest

from tests.parts.grading import grader, group
from torchtitan_rl.core.grading.reward import ERROR_CHARACTERS
from torchtitan_rl.core.text import known_secrets, masked

SECRET = "sk-12345678"


@pytest.fixture(params=["OPENAI_API_KEY", "HF_TOKEN", "MY_SECRET", "db_password"])
def secret(request, monkeypatch):
    monkeypatch.setenv(request.param, SECRET)
    monkeypatch.setenv("SHORT_TOKEN", "abc")
    return SECRET


def test_secrets_are_hidden_inside_lists_and_dicts_and_nothing_else_is(secret):
    cell = {"said": [f"Bearer {SECRET}!", ("abc", 3)], "n": 1.5}
    assert masked(cell, known_secrets()) == {"said": ["Bearer ***!", ["abc", 3]], "n": 1.5}


def test_of_two_secrets_the_longer_one_is_hidden_whole(secret, monkeypatch):
    monkeypatch.setenv("OTHER_TOKEN", f"{SECRET}-and-more")
    assert masked(f"{SECRET}-and-more {SECRET}", known_secrets()) == "*** ***"


def test_without_secrets_a_value_stays_the_same_object(monkeypatch):
    for name in ("OPENAI_API_KEY", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHORT_TOKEN", "abc")
    row = {"text": SECRET}
    assert known_secrets() is None or masked(row, known_secrets()) == row


def test_a_long_error_is_not_cut_inside_a_secret(secret):
    def fails(completions, **_):
        raise ValueError("x" * (ERROR_CHARACTERS - ERROR_CHARACTERS // 3 - 4) + SECRET + "y" * 2000)

    one = grader(fails, on_failure="none")
    [scored] = one.score([group("a")])
    assert "sk-1" not in scored.samples[0].extra["error/fails"]
    one.close()
