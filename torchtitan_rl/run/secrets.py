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
        return {
            key: HIDDEN if _is_secret(key, entry) else _hidden(entry, secrets)
            for key, entry in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [
            HIDDEN
            if str(before).startswith("--") and _is_secret(before, entry)
            else _hidden(entry, secrets)
            for before, entry in zip(["", *value], value)
        ]
    return value


def _is_secret(name: Any, value: Any) -> bool:
    """Whether a text is a secret by the name of its field or command-line option."""
    return isinstance(value, str) and value != "" and _NAME.search(str(name)) is not None


def _values_of_variables() -> list[str]:
    """The secrets in the environment, longest first. A file's path, as in GOOGLE_APPLICATION_CREDENTIALS, is none."""
    patterns = [name.strip() for name in os.environ.get(MORE_NAMES, "").split(",")]
    values = [
        value
        for name, value in os.environ.items()
        if name != MORE_NAMES
        and (_VARIABLE.search(name) or any(fnmatch(name, pattern) for pattern in patterns))
    ]
    secrets = [v for v in values if len(v) >= _SHORTEST and not os.path.exists(v)]
    return sorted(secrets, key=len, reverse=True)
