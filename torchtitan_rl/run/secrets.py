"""Removes keys and passwords from what is stored about a run: its config, its command line, its diff and how it ended."""

import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

HIDDEN = "***"
MORE_NAMES = "TORCHTITAN_RL_SECRETS"
"""The environment variable that lists further variables with secrets: names or patterns such as "JUDGE_*", separated by commas."""

_VARIABLE = re.compile(
    r"(?:(?:key|key_id|token|dsn)s?(?:_?\d+)?|(?:pass(?!eng)|secret|auth(?!or(?!iz))|cred(?!it))\w*)$",
    re.IGNORECASE,
)
"""Names that end in KEY, TOKEN or DSN, or have PASS, SECRET, AUTH or CRED in them, but not PASSENGER, AUTHOR and CREDIT."""
_SHORTEST = 8
"""Characters. Shorter values of variables would also match ordinary words."""

_FIELD = r"(?:api[_-]?key|access[_-]?key|token|secret|password|passwd|credentials?)"
"""Endings of the names of config fields, options and arguments that hold a secret."""
_NAME = re.compile(rf"{_FIELD}$", re.IGNORECASE)
_INSIDE = [
    re.compile(rf"({_FIELD}['\"]?\s*[=:]\s*(['\"]))[^'\"\n]+(?=\2)", re.IGNORECASE),
    re.compile(rf"((?:--|[?&])[\w.-]*{_FIELD}=)[^\s&'\"]+", re.IGNORECASE),
    re.compile(r"(\w://[^/\s:@]*:)[^/\s@]+(?=@)"),
]
"""Secrets in a longer text, after what stays: a quoted value of a name, an option's or an address's, and an address's password."""


def without_secrets(value: Any) -> Any:
    """A copy of a JSON-like value, command line or source text with *** in place of each secret.

    A secret is a text that has a name such as api_key, the password in an address, or the value of an environment variable with
    such a name, for example OPENAI_API_KEY, wherever it occurs.

    Example: without_secrets(["mine.py:judge(api_key='sk-1')"]) == ["mine.py:judge(api_key='***')"]
    """
    return _hidden(value, _values_of_variables())


def _hidden(value: Any, secrets: Sequence[str]) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, HIDDEN)
        for pattern in _INSIDE:
            value = pattern.sub(rf"\1{HIDDEN}", value)
        return value
    if isinstance(value, Mapping):
        return {key: _hidden_entry(key, entry, secrets) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        words = [before if str(before).startswith("--") else "" for before in ["", *value]]
        return [_hidden_entry(word, entry, secrets) for word, entry in zip(words, value)]
    return value


def _hidden_entry(name: Any, entry: Any, secrets: Sequence[str]) -> Any:
    """The value of a field or a command-line option, which may be a secret by its name."""
    is_secret = isinstance(entry, str) and entry != "" and _NAME.search(str(name))
    return HIDDEN if is_secret else _hidden(entry, secrets)


def _values_of_variables() -> list[str]:
    """The secrets in the environment, longest first. A file's path, as in GOOGLE_APPLICATION_CREDENTIALS, is none."""
    patterns = [name.strip() for name in os.environ.get(MORE_NAMES, "").split(",")]
    secrets = []
    for name, value in os.environ.items():
        is_named = _VARIABLE.search(name) or any(fnmatch(name, pattern) for pattern in patterns)
        is_text = len(value) >= _SHORTEST and not os.path.exists(value)
        if is_named and is_text and name != MORE_NAMES:
            secrets.append(value)
    return sorted(secrets, key=len, reverse=True)
