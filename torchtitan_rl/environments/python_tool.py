"""A tool that runs the policy's Python programs, each in a process of its own. Its limits stop accidents, not attacks."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from torchtitan_rl.environments.tools import Tool, in_process
from torchtitan_rl.fields.field_limits import check_fields
from torchtitan_rl.fields.number import number
from torchtitan_rl.fields.typed_arguments import typed

COMMAND = (sys.executable, "-I", "-")
"""Runs a program from the standard input, with the packages of the run's Python."""

MOST_CODE = 60_000
"""Maximum bytes of a program. A pipe holds so many, so handing them over never blocks."""

INHERITED = ("PATH", "LANG", "LC_ALL", "TZ")
"""Environment variables of the run that a program gets."""


class ProgramError(Exception):
    """A program failed or was stopped: the reason, and what it printed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramLimits:
    """Limits of one program."""

    seconds: float = number(5.0, above=0)
    """Time, after which the program and its process group are killed."""
    cpu_seconds: int = number(5, least=1)
    """CPU time of each of its processes."""
    memory_bytes: int = number(2**30, least=1)
    """Address space of each of its processes. Beyond it Python raises MemoryError."""
    file_bytes: int = number(2**20, least=1)
    """Size of what it prints, and of each file that it writes."""

    def __post_init__(self) -> None:
        check_fields(self, "ProgramLimits")


@typed
def python_tool(limits: ProgramLimits | None = None, *, command: Sequence[str] = COMMAND) -> Tool:
    """Returns the tool `python(code)`.

    Args:
        command: reads a program from its standard input and runs it. Example: ("docker", "run", "--rm", "-i", "--network",
            "none", "--memory", "512m", "python:3.13-slim", "python", "-")
    """
    chosen = limits or ProgramLimits()
    if shutil.which(command[0]) is None:  # else only the policy would read of it
        raise FileNotFoundError(f"command = {list(command)}: there is no program {command[0]!r}")

    @in_process  # its program has the time limit
    def python(code: str) -> str:
        """
        Runs a Python program and returns what it prints.

        Args:
            code: The program.
        """
        return run_program(code, chosen, command=command)

    return python


def run_program(code: str, limits: ProgramLimits, *, command: Sequence[str] = COMMAND) -> str:
    """Runs a program in a new folder and returns what it prints. Raises ProgramError if it fails or exceeds a limit."""
    source = code.encode(errors="replace")
    if len(source) > MOST_CODE:
        raise ProgramError(f"the program has {len(source):,} bytes; expected at most {MOST_CODE:,}")
    with (
        tempfile.TemporaryDirectory(prefix="program-") as folder,
        tempfile.TemporaryFile() as printed,
    ):
        reason = _run(source, limits, command, folder, printed)
        size = printed.seek(0, os.SEEK_END)
        printed.seek(0)
        text = printed.read(limits.file_bytes).decode(errors="replace")
    if size >= limits.file_bytes:
        reason = f"printed {limits.file_bytes:,} bytes or more"
    if reason:
        raise ProgramError(f"the program {reason}: {text}")
    return text


def _run(
    source: bytes, limits: ProgramLimits, command: Sequence[str], folder: str, printed: IO[bytes]
) -> str:
    """Runs the program. Returns why it failed; "" if it did not."""
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    own = {"HOME": folder, "TMPDIR": folder}
    own |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # threads take memory
    process = subprocess.Popen(
        command, cwd=folder, env={**inherited, **own}, stdin=subprocess.PIPE, stdout=printed,
        stderr=subprocess.STDOUT, start_new_session=True, bufsize=0,
    )  # fmt: skip
    try:
        _limit(process.pid, limits)  # before it has the program
        with contextlib.suppress(BrokenPipeError):  # it has ended; its exit code says why
            process.stdin.write(source)
        process.stdin.close()
        code = process.wait(limits.seconds)
    except subprocess.TimeoutExpired:
        return f"took longer than {limits.seconds:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # all of the group have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code == -signal.SIGXCPU:
        return f"used more than {limits.cpu_seconds} s of CPU time"
    if code < 0:
        return f"was killed by signal {-code} ({signal.strsignal(-code)})"
    return f"ended with exit code {code}" if code else ""


def _limit(pid: int, limits: ProgramLimits) -> None:
    cpu = limits.cpu_seconds
    # SIGXCPU, and SIGKILL a second later
    resource.prlimit(pid, resource.RLIMIT_CPU, (cpu, cpu + 1))
    resource.prlimit(pid, resource.RLIMIT_AS, (limits.memory_bytes,) * 2)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limits.file_bytes,) * 2)
    resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
