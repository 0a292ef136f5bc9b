"""Removes keys and passwords from what is written about a run: its config, its command line and addresses."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"

_NAME = re.compile(r"(api_?key|access_?key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
_ASSIGNED = re.compile(
    r"(\b\w*(?:api_?key|access_?key|token|secret|password|passwd|credentials?)(?:\s*=|['\"]\s*:)\s*['\"]?)[^\s'\",)&]+",
    re.IGNORECASE,
)
_IN_ADDRESS = re.compile(r"(\w://[^/\s:@]*:)[^/\s@]+(?=@)")
_SHORTEST = 8
"""Characters. Shorter values of environment variables would also match ordinary words."""


def without_secrets(value: Any) -> Any:
    """A copy of a JSON-like value, or of a command line, with what looks like a secret replaced by ***.

    A secret is a text that has a name such as api_key, or that follows one and "=". It is also the password in an address, and
    the value of an environment variable with such a name, for example OPENAI_API_KEY, wherever it occurs.

    Example: without_secrets(["mine.py:judge(api_key='sk-1')"]) == ["mine.py:judge(api_key='***')"]
    """
    if isinstance(value, str):
        return _without(value)
    if isinstance(value, Mapping):
        return {key: HIDDEN if _names_one(key, entry) else without_secrets(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        options = [one if str(one).startswith("--") else "" for one in ["", *value]]
        return [HIDDEN if _names_one(option, one) else without_secrets(one) for option, one in zip(options, value)]
    return value


def _names_one(name: Any, value: Any) -> bool:
    """Whether `value` is a secret by the name of its field or command-line option."""
    return isinstance(value, str) and bool(value and _NAME.search(str(name).replace("-", "_")))


def _without(text: str) -> str:
    text = masked(text)
    return _IN_ADDRESS.sub(rf"\1{HIDDEN}", _ASSIGNED.sub(rf"\1{HIDDEN}", text))


def masked(value: Any) -> Any:
    """The value with *** in place of known secrets in its texts, also inside lists and dicts.

    Known secrets are the values of environment variables such as OPENAI_API_KEY, HF_TOKEN or MY_SECRET.
    """
    secrets = {v for name, v in os.environ.items() if len(v) >= _SHORTEST and _NAME.search(name)}
    if not secrets:
        return value
    pattern = re.compile("|".join(map(re.escape, sorted(secrets, key=len, reverse=True))))
    return _replaced(value, pattern)


def _replaced(value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return pattern.sub(HIDDEN, value)
    if isinstance(value, dict):
        return {key: _replaced(item, pattern) for key, item in value.items()}
    return [_replaced(item, pattern) for item in value] if isinstance(value, (list, tuple)) else value
