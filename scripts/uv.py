"""Runs the uv that is installed beside this Python with pip's configuration, which uv does not read itself.

.venv/bin/python scripts/uv.py pip install six

The settings are passed as uv's environment variables, not as options, because the address of an index may hold a password. A
variable of uv that the user has set stays.
"""

import ast
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

VARIABLES = {  # of pip: (of uv, what joins several values)
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_EXTRA_INDEX_URL", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "client-cert": ("SSL_CLIENT_CERT", " "),
    "proxy": ("ALL_PROXY", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
}


def variables(listed: str) -> dict[str, str]:
    """uv's environment variables for the output of `pip config list`.

    Example: variables("global.find-links='/wheels'") == {"UV_FIND_LINKS": "/wheels", "UV_INDEX_STRATEGY": "unsafe-best-match"}
    """
    # As pip, compare a package's versions over all places, instead of taking the first place that has the package.
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    lines = [line.partition("=") for line in listed.splitlines() if "=" in line]
    for kind in ("global.", "install.", ":env:."):  # a later kind replaces an earlier one
        for key, _, value in lines:
            if key.startswith(kind) and key.removeprefix(kind) in VARIABLES:
                name, joint = VARIABLES[key.removeprefix(kind)]
                found[name] = joint.join(str(ast.literal_eval(value)).split())
    return found


def main() -> None:
    """Become uv."""
    config = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(config, capture_output=True, text=True, check=True).stdout
    offline = ["--no-index"] if re.search(r"no-index='(1|true|yes|on)'", listed, re.IGNORECASE) else []
    uv = Path(sysconfig.get_path("scripts"), "uv")
    os.execve(uv, ["uv", *sys.argv[1:], *offline], {**variables(listed), **os.environ})


if __name__ == "__main__":
    main()
