"""Reads the folder of one task as Harbor 0.25 has it: instruction.md, task.toml, environment/, tests/, solution/."""

import math
import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

_FOLLOWED = {
    "environment": "allow_internet build_timeout_sec cpus docker_image env memory memory_mb network_mode os storage storage_mb workdir",
    "agent": "timeout_sec",
    "verifier": "timeout_sec env",
    "solution": "env",
}
"""Fields of task.toml that are followed, by section. Its other sections describe the task."""
_NOT_FOLLOWED = ("environment/docker-compose.yaml", "environment/.dockerignore", "steps")
_PLAIN = re.compile(r"(python|debian|ubuntu|buildpack-deps)(:[\w.-]+)?(\s+as\s+\S+)?", re.I)
"""Images of which a task may need no more than this machine's /usr."""
_INSTALLS = re.compile(
    r"\b(apt-get|apt|apk|yum|dnf|conda|uvx|npx)\b|\b(pip3?|uv|npm|cargo|gem|go) (pip )?install\b|\bgit clone\b"
    r"|\b(curl|wget)\b[^\n]*https?://(?!localhost|127\.)"
)
_OTHER_FORMS = re.compile(r"(RUN|COPY)\s+(\[|--)|ENV\s+[^=\s]+\s|.*<<")
"""Forms of a Dockerfile's instructions that are not followed."""
_CANARY = re.compile(r"\A((<!--[^\n]*canary[^\n]*-->|#[^\n]*canary[^\n]*)(\n|\Z))+", re.I)
_INSTRUCTIONS = """set -e; cd /
FROM() { :; }; CMD() { :; }; LABEL() { :; }; EXPOSE() { :; }; MAINTAINER() { :; }
RUN() { sh -c "$1"; }; ENV() { export "$@"; }; WORKDIR() { mkdir -p "$1"; cd "$1"; }
COPY() { local to="${!#}"; for from in "${@:1:$#-1}"; do
if [ -d "$from" ]; then mkdir -p "$to"; cp -a "$from/." "$to"; continue; fi
if [[ $to == */ || $# -gt 2 ]]; then mkdir -p "$to"; else mkdir -p "$(dirname "$to")"; fi
cp -a "$from" "$to"; done; }
"""
"""What a Dockerfile's instructions do to files, in bash. Harbor runs no CMD."""


class LeftOut(Exception):
    """The task cannot be used here: the reason, which follows "1 task"."""


class TaskFolder:
    """One task."""

    def __init__(self, folder: Path) -> None:
        """Raises LeftOut for a folder that Harbor could not read."""
        self.folder = folder
        for name in ("task.toml", "instruction.md", "tests/test.sh"):
            if not (folder / name).is_file():
                raise LeftOut(f"without {name}")
        try:
            self._fields = tomllib.loads((folder / "task.toml").read_text())
        except ValueError as error:
            raise LeftOut(f"whose task.toml cannot be read: {error}") from error

    def get(self, section: str, field: str, default: Any = None) -> Any:
        return self._fields.get(section, {}).get(field, default)

    def variables(self, section: str) -> dict[str, str]:
        """Returns a section's environment variables. `${NAME}` and `${NAME:-default}` are filled in from the run's."""
        form = re.compile(r"\$\{([^}:]+)(?::-([^}]*))?\}")
        return {
            name: form.sub(lambda match: os.environ.get(match[1], match[2] or ""), str(value))
            for name, value in self.get(section, "env", {}).items()
        }

    def megabytes(self, what: str, most: int) -> int:
        """Returns what task.toml asks for as `memory` ("2G") or `memory_mb`, or of storage, but at most `most`.

        Raises LeftOut for a size in another form.
        """
        size = self.get("environment", what) or f"{self.get('environment', f'{what}_mb', most)}M"
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])", str(size).lower())
        if match is None:
            raise LeftOut(f"with environment.{what} = {size!r} in task.toml")
        return min(most, math.ceil(float(match[1]) * {"k": 1 / 1024, "m": 1, "g": 1024}[match[2]]))

    def check(self, *, network: bool) -> None:
        """Raises LeftOut if the task asks for what no sandbox here has, or needs a network where there is none."""
        for name in _NOT_FOLLOWED:
            if (self.folder / name).exists():
                raise LeftOut(f"with {name}")
        for section, known in _FOLLOWED.items():
            for field, value in self._fields.get(section, {}).items():
                if value and field not in known.split():
                    raise LeftOut(f"with {section}.{field} in task.toml")
        for name in () if network else ("tests/test.sh", "solution/solve.sh"):
            if (self.folder / name).exists():
                _check_offline(name, (self.folder / name).read_text())

    def build_script(self) -> str:
        """Returns a bash script that does in a sandbox what the Dockerfile does in an image; environment/ is at /.context.

        Raises LeftOut for a Dockerfile that needs more than files on a plain image.
        """
        workdir = self.get("environment", "workdir")
        text = f"FROM {self.get('environment', 'docker_image')}\nWORKDIR {workdir or '/'}\nCOPY . ."
        file = self.folder / "environment/Dockerfile"
        if file.exists():  # else Harbor copies environment/ into the working folder
            text = re.sub(r"(?m)^\s*#.*\n?", "", file.read_text())
            text = re.sub(r"\\\s*\n", " ", text) + f"\nWORKDIR {workdir or '.'}"
        script = [_INSTRUCTIONS]
        for line in filter(None, map(str.strip, text.splitlines())):
            word, _, rest = line.partition(" ")
            if word == "FROM" and not _PLAIN.fullmatch(rest):
                raise LeftOut(f"with the image {rest}")
            if f"{word}()" not in _INSTRUCTIONS or _OTHER_FORMS.match(line):
                raise LeftOut(f"with {line[:40]!r} in the Dockerfile")
            _check_offline("Dockerfile", line)
            if word == "COPY":
                *sources, target = rest.split()
                rest = " ".join([*(f"/.context/{source}" for source in sources), target])
            is_shell = word in ("COPY", "ENV", "WORKDIR")  # their $NAME is filled in
            script.append(f"{word} {rest if is_shell else shlex.quote(rest)}")
        return "{ " + "\n".join([*script, "} > /dev/null", "rm -rf /.context; env -0"])


def read_instruction(folder: Path) -> str:
    """Returns a task's instruction without the marks of benchmarks at its beginning, as Harbor shows it."""
    file = folder / "instruction.md"
    return _CANARY.sub("", file.read_text()).strip() if file.is_file() else ""


def _check_offline(name: str, script: str) -> None:
    """Raises LeftOut if a script, without its comments, installs or downloads something."""
    if match := _INSTALLS.search(re.sub(r"(?m)^\s*#.*$", "", script)):
        raise LeftOut(f"whose {name} needs a network ({match[0][:40]})")
