"""Environment variables that hold keys and passwords."""

import os
import re
from fnmatch import fnmatch

MORE_NAMES = "TORCHTITAN_RL_SECRETS"
"""The environment variable that lists further variables with secrets: names or patterns such as "JUDGE_*", separated by commas."""

ADDRESS_PASSWORD = re.compile(r"(\w://[^/\s:@]*:)([^/\s@]+)(?=@)")
"""The part of an address before its password, and the password."""

_NAME = re.compile(
    r"(?:(?:key|key_id|token|dsn)s?(?:_?\d+)?|(?:pass(?!eng)|secret|auth(?!or(?!iz))|cred(?!it))\w*)$",
    re.IGNORECASE,
)
"""Names that end in KEY, TOKEN or DSN, or have PASS, SECRET, AUTH or CRED in them, but not PASSENGER, AUTHOR and CREDIT."""
_SHORTEST = 8
"""Characters. Shorter values would also match ordinary words."""


def secret_values() -> dict[str, str]:
    """The secret of each environment variable that has one: its value, or the password in its address.

    Example: {"OPENAI_API_KEY": "sk-...", "DATABASE_URL": "hunter-123"}
    """
    more = [name.strip() for name in os.environ.get(MORE_NAMES, "").split(",") if name.strip()]
    found = {}
    for name, value in os.environ.items():
        if name != MORE_NAMES and (
            _NAME.search(name) or any(fnmatch(name, pattern) for pattern in more)
        ):
            found[name] = value
        elif password := ADDRESS_PASSWORD.search(value):
            found[name] = password[2]
    return {
        name: value
        for name, value in found.items()
        if len(value) >= _SHORTEST and not _is_path(value)
    }


def _is_path(value: str) -> bool:
    """Whether the value names a file, as that of GOOGLE_APPLICATION_CREDENTIALS does, and is no secret itself."""
    return value.startswith("/") and os.path.exists(value)
