"""Keys and passwords are not stored; everything else is, as it was."""

import pytest

from torchtitan_rl.run.secrets import without_secrets


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ({"api_key": "sk-1", "seed": 3}, {"api_key": "***", "seed": 3}),
        ({"stop_token_ids": [5], "tokenizer": "a3f", 2: "two"}, {"stop_token_ids": [5], "tokenizer": "a3f", 2: "two"}),
        (["mine.py:judge(api_key='sk-1', n=2)"], ["mine.py:judge(api_key='***', n=2)"]),
        (["train", "--task.api-key", "sk-1", "--seed", "3"], ["train", "--task.api-key", "***", "--seed", "3"]),
        (["--task.password=hunter"], ["--task.password=***"]),
        ("http://me:hunter@judge:8000/v1?n=1", "http://me:***@judge:8000/v1?n=1"),
        ("https://judge:8000/v1?api_key=sk-1&n=2", "https://judge:8000/v1?api_key=***&n=2"),
        ("Say the secret: five.", "Say the secret: five."),
        ("token = tokens[0]; api_key = 'sk-1'", "token = tokens[0]; api_key = '***'"),
    ],
)
def test_values_with_secret_names_are_hidden(value, stored):
    assert without_secrets(value) == stored


@pytest.mark.parametrize(
    "name",
    [
        "OPENAI_API_KEY", "HF_TOKEN", "AWS_ACCESS_KEY_ID", "db_password", "MY_AUTH", "SENTRY_DSN", "GIT_CREDS", "DB_PASS_1",
        "SECRET_VALUE", "TOKEN_1", "API_KEYS", "CORP_ID",
    ],
)  # fmt: skip
def test_the_value_of_a_secret_variable_is_hidden_wherever_it_occurs(monkeypatch, name):
    monkeypatch.setenv("TORCHTITAN_RL_SECRETS", "LICENCE, CORP_*")
    monkeypatch.setenv(name, "hunter-12345")
    value = {"headers": ["Bearer hunter-12345!", ("abc", 3)], "n": 1.5}
    assert without_secrets(value) == {"headers": ["Bearer ***!", ["abc", 3]], "n": 1.5}


@pytest.mark.parametrize(
    ("name", "value"),
    [("GIT_AUTHOR_NAME", "hunter-12345"), ("TOKENIZERS_PARALLELISM", "hunter-12345"), ("SHORT_TOKEN", "abc"),
     ("GOOGLE_APPLICATION_CREDENTIALS", __file__)],
)  # fmt: skip
def test_other_variables_short_values_and_paths_are_no_secrets(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert without_secrets(f"say {value}") == f"say {value}"
