"""Removes keys and passwords from what is written about a run: its config, its command line and addresses."""

import html
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any
from urllib.parse import quote, quote_plus

from torchtitan_rl.run.secret_variables import ADDRESS_PASSWORD, secret_values
from torchtitan_rl.text import mapped

HIDDEN = "***"
_FIELD = r"(?:api_?key|access_?key|token|secret|password|passwd|credentials?)"
"""Endings of the names of config fields, options and arguments that hold a secret."""
_NAME = re.compile(rf"{_FIELD}$", re.IGNORECASE)
_ASSIGNED = re.compile(rf"(\b\w*{_FIELD}(?:\s*=|['\"]\s*:)\s*['\"]?)[^\s'\",)&]+", re.IGNORECASE)
_LITERAL = re.compile(rf"(\b\w*{_FIELD}['\"]?\s*(?:=|:)\s*(['\"]))[^'\"\n]+(?=\2)", re.IGNORECASE)


_FORMS: Sequence[Callable[[str], str]] = (
    lambda text: json.dumps(text)[1:-1],
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: repr(text)[1:-1],
    lambda text: ascii(text)[1:-1],
    quote,
    partial(quote, safe=""),
    quote_plus,
    html.escape,
    partial(html.escape, quote=False),
    lambda text: shlex.quote(text).strip("'"),
)
"""How texts are written inside others."""


def without_secrets(value: Any) -> Any:
    """A copy of a JSON-like value or command line with everything that looks like a secret replaced by ***.

    A secret is a text that has a name such as api_key, or that follows one and "=". It is also the password in an address, and
    the value of an environment variable with such a name, for example OPENAI_API_KEY, wherever it occurs.

    Example: without_secrets(["mine.py:judge(api_key='sk-1')"]) == ["mine.py:judge(api_key='***')"]
    """
    if isinstance(value, str):
        return _without(value)
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if _names_one(key, entry) else without_secrets(entry)
            for key, entry in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        options = [one if str(one).startswith("--") else "" for one in ["", *value]]
        return [
            HIDDEN if _names_one(option, one) else without_secrets(one)
            for option, one in zip(options, value)
        ]
    return value


def _names_one(name: Any, value: Any) -> bool:
    """Whether `value` is a secret by the name of its field or command-line option."""
    return isinstance(value, str) and bool(value and _NAME.search(str(name).replace("-", "_")))


def _without(text: str) -> str:
    text = masked(text)
    return ADDRESS_PASSWORD.sub(rf"\1{HIDDEN}", _ASSIGNED.sub(rf"\1{HIDDEN}", text))


def source_without_secrets(source: str) -> str:
    """A copy of Python source without known secrets, and without texts that are assigned to a name such as api_key.

    Example: source_without_secrets("token = tokens[0]; api_key = 'sk-1'") == "token = tokens[0]; api_key = '***'"
    """
    return ADDRESS_PASSWORD.sub(rf"\1{HIDDEN}", _LITERAL.sub(rf"\1{HIDDEN}", masked(source)))


def masked(value: Any) -> Any:
    """The value with *** in place of known secrets in its texts, also inside lists and dicts, however they are quoted or escaped.

    Known secrets are the values of environment variables with such a name (OPENAI_API_KEY, HF_TOKEN, DB_PASS, SENTRY_DSN), of those
    that TORCHTITAN_RL_SECRETS lists, and passwords in addresses such as DATABASE_URL's.
    """
    secrets = frozenset(secret_values().values())
    return mapped(value, partial(_pattern(secrets).sub, HIDDEN)) if secrets else value


@lru_cache(maxsize=4)
def _pattern(secrets: frozenset[str]) -> re.Pattern[str]:
    """Matches each secret as it is, as repr, JSON, URLs, HTML and a shell write it, and as one of these writes what another wrote."""
    once = {form(secret) for secret in secrets for form in _FORMS}
    forms = secrets | once | {form(written) for written in once for form in _FORMS}
    return re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True))))
