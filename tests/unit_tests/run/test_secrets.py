"""Keys and passwords are not written down; everything else is, as it was."""

import html
import json
import shlex
from urllib.parse import quote, quote_plus

import pytest

from torchtitan_rl.run.secrets import masked, without_secrets


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
def test_fields_with_secret_names_are_hidden(given, kept):
    assert without_secrets(given) == kept


SECRET = "sk-12345678"


@pytest.fixture(params=["OPENAI_API_KEY", "HF_TOKEN", "MY_SECRET", "db_password"])
def secret(request, monkeypatch):
    monkeypatch.setenv(request.param, SECRET)
    monkeypatch.setenv("SHORT_TOKEN", "abc")


def test_secrets_are_hidden_inside_lists_and_dicts_and_nothing_else_is(secret):
    cell = {"said": [f"Bearer {SECRET}!", ("abc", 3)], "n": 1.5}
    assert masked(cell) == {"said": ["Bearer ***!", ["abc", 3]], "n": 1.5}


@pytest.mark.parametrize(
    "name",
    [
        "JUDGE_KEY", "OPENAI_KEY", "DB_PASS", "MY_AUTH", "AWS_ACCESS_KEY_ID", "SENTRY_DSN", "GIT_CREDS", "DB_PASS_1", "MY_PASSCODE",
        "AUTH_HEADER", "AUTHORIZATION", "SECRET_VALUE", "CREDENTIALS_JSON", "TOKEN_1", "API_KEYS", "MY_TOKENS", "PGPASSWORD",
    ],
)  # fmt: skip
def test_variables_of_many_names_are_secret(monkeypatch, name):
    monkeypatch.setenv(name, "hunter-12345")
    assert masked("say hunter-12345") == "say ***"


@pytest.mark.parametrize("name", ["GIT_AUTHOR_NAME", "TOKENIZERS_PARALLELISM", "CREDITS", "KEYBOARD", "PASSENGERS"])
def test_variables_of_like_names_are_not_secret(monkeypatch, name):
    monkeypatch.setenv(name, "hunter-12345")
    assert masked("say hunter-12345") == "say hunter-12345"


WRITTEN = [
    str,
    repr,
    json.dumps,
    quote,
    quote_plus,
    html.escape,
    shlex.quote,
    lambda text: json.dumps(json.dumps(text)),
    lambda text: quote(repr(text)),
    lambda text: json.dumps(repr(text)),
    lambda text: repr(json.dumps(text)),
    lambda text: quote(str({"a": text})[7:-2]),
]


@pytest.mark.parametrize("write", WRITTEN)
@pytest.mark.parametrize("secret", ["pa'ss\"wö/rd &<1>", "a\\b\nc\td%20e+f", "plain-and-long"])
def test_secret_is_hidden_in_every_encoding(monkeypatch, secret, write):
    monkeypatch.setenv("OPENAI_API_KEY", secret)
    shown = masked(f"before {write(secret)} after")
    assert shown.startswith("before ")
    assert shown.endswith(" after")
    assert set(shown.removeprefix("before ").removesuffix(" after")) <= set("*'\"\\%2720")


def test_the_user_may_name_further_variables(monkeypatch):
    monkeypatch.setenv("TORCHTITAN_RL_SECRETS", "LICENCE, CORP_*")
    monkeypatch.setenv("LICENCE", "abcdefgh-1")
    monkeypatch.setenv("CORP_ID", "abcdefgh-2")
    assert masked("abcdefgh-1 abcdefgh-2 LICENCE, CORP_*") == "*** *** LICENCE, CORP_*"


def test_the_password_of_an_address_is_secret_and_its_host_is_not(monkeypatch):
    monkeypatch.setenv("DATABASE_URL", "postgres://me:hunter-12345@db:5432/rows")
    assert masked("hunter-12345 at db:5432") == "*** at db:5432"


def test_file_path_is_not_treated_as_a_secret(monkeypatch, tmp_path):
    (tmp_path / "key.json").write_text("{}")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    assert masked(str(tmp_path / "key.json")) == str(tmp_path / "key.json")
