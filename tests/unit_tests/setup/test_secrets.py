"""Keys and passwords are not written down; everything else is, as it was."""

import json

import pytest

from torchtitan_rl.setup.registry import load_config
from torchtitan_rl.setup.secrets import masked, without_secrets


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"api_key": "sk-1", "seed": 3}, {"api_key": "***", "seed": 3}),
        ({"hub_token": "hf_x", "eos_token_id": 2}, {"hub_token": "***", "eos_token_id": 2}),
        (["mine.py:judge(api_key='sk-1', n=2)"], ["mine.py:judge(api_key='***', n=2)"]),
        (["train", "--task.api-key", "sk-1", "--seed", "3"], ["train", "--task.api-key", "***", "--seed", "3"]),
        (["--task.password=hunter"], ["--task.password=***"]),
        ({"id2label": {0: "a"}}, {"id2label": {0: "a"}}),
        ("http://me:hunter@judge:8000/v1?n=1", "http://me:***@judge:8000/v1?n=1"),
        ("https://judge:8000/v1", "https://judge:8000/v1"),
        ("Say the secret: five.", "Say the secret: five."),
        ({2: "two"}, {2: "two"}),
        ('{"api_key": "sk-1"}', '{"api_key": "***"}'),
        ({"stop_token_ids": [5], "max_tokens": 32, "tokenizer": "a3f"}, {"stop_token_ids": [5], "max_tokens": 32, "tokenizer": "a3f"}),
    ],
)  # fmt: skip
def test_what_a_name_calls_a_secret_is_hidden(given, kept):
    assert without_secrets(given) == kept


def test_the_value_of_a_secret_variable_is_hidden_wherever_it_stands(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-12345678")
    assert without_secrets({"rewards": ["a.py:f('sk-12345678')"]}) == {"rewards": ["a.py:f('***')"]}


def test_an_ordinary_config_is_written_as_it_is():
    described = json.loads(json.dumps(load_config("debug").to_dict(), default=repr))
    assert without_secrets(described) == described


SECRET = "sk-12345678"


@pytest.fixture(params=["OPENAI_API_KEY", "HF_TOKEN", "MY_SECRET", "db_password"])
def secret(request, monkeypatch):
    monkeypatch.setenv(request.param, SECRET)
    monkeypatch.setenv("SHORT_TOKEN", "abc")


def test_secrets_are_hidden_inside_lists_and_dicts_and_nothing_else_is(secret):
    cell = {"said": [f"Bearer {SECRET}!", ("abc", 3)], "n": 1.5}
    assert masked(cell) == {"said": ["Bearer ***!", ["abc", 3]], "n": 1.5}


def test_of_two_secrets_the_longer_one_is_hidden_whole(secret, monkeypatch):
    monkeypatch.setenv("OTHER_TOKEN", f"{SECRET}-and-more")
    assert masked(f"{SECRET}-and-more {SECRET}") == "*** ***"


def test_a_value_of_a_few_characters_is_no_secret(monkeypatch):
    for name in ("OPENAI_API_KEY", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHORT_TOKEN", "abc")
    row = {"text": SECRET}
    assert masked(row) == row
