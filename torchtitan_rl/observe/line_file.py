"""An append-only JSON-lines file that survives kill -9 and resumes without lost or duplicate steps."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

_STEP = re.compile(rb'\{"step": (-?\d+)')


class LineFile:
    """Batches of JSON lines, each batch complete or absent.

    A batch and the `end` that closes it are written by one call. Anything after the last `end` is the partial batch of
    a killed process and is cut off when the file is opened. Every line starts with its step, so that a resumed run can
    truncate the file at the step where it continues. Raises OSError like any file.
    """

    def __init__(self, path: Path, end: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        whole = _whole_size(path, end)
        if whole < os.fstat(self._file).st_size:
            os.ftruncate(self._file, whole)
        self._end = end
        self.size = whole
        """Bytes in the file."""

    def append(self, step: int, lines: list[dict[str, Any]]) -> None:
        """Writes one batch for `step`. NaN and infinity are written as null, lone surrogates as escapes."""
        batch = b"".join(_line(step, line) for line in lines)[:-1] + self._end
        rest = memoryview(batch)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            # A partial batch would hide the batches after it. The write's error is the one to report.
            with suppress(OSError):
                os.ftruncate(self._file, self.size)
            raise
        self.size += len(batch)

    def rewind(self, step: int) -> None:
        """Truncates the file after the last line of an earlier step than `step`."""
        offset = kept = 0
        with open(self._path, "rb") as lines:
            for line in lines:
                offset += len(line)
                step_of_line = _STEP.match(line)
                if step_of_line and int(step_of_line[1]) < step:
                    kept = offset
        os.ftruncate(self._file, kept)
        self.size = kept

    def close(self) -> None:
        os.close(self._file)


def read_lines(path: Path, end: bytes) -> Iterator[dict[str, Any]]:
    """The lines of all complete batches but damaged ones; none if there is no file. Safe while the file is being written."""
    if not path.exists():
        return
    remaining = _whole_size(path, end)
    with open(path, "rb") as lines:
        for line in lines:
            remaining -= len(line)
            if remaining < 0:
                return
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and "step" in row:
                yield row


def name_first(file: Path, name: Path) -> None:
    """Give a whole file its name, unless another process has given it to one; the file is removed then."""
    try:
        os.link(file, name)
    except FileExistsError:
        pass
    except OSError:  # exFAT, SMB and Google Drive have no hard links
        if not name.exists():
            file.rename(name)
    file.unlink(missing_ok=True)


def _line(step: int, line: dict[str, Any]) -> bytes:
    ordered = {"step": step, **{key: value for key, value in line.items() if key != "step"}}
    return json.dumps(without_nan(ordered), allow_nan=False).encode("ascii") + b"\n"


def without_nan(value: Any) -> Any:
    """The value with None for NaN and infinity, which JSON lacks."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return value


def _whole_size(path: Path, end: bytes) -> int:
    """Bytes up to and including the last `end`; searches backwards from the end of the file."""
    block = 1 << 20
    with open(path, "rb") as file:
        position = file.seek(0, os.SEEK_END)
        tail = b""
        while position > 0:
            start = max(0, position - block)
            file.seek(start)
            tail = file.read(position - start) + tail[: len(end) - 1]
            place = tail.rfind(end)
            if place >= 0:
                return start + place + len(end)
            position = start
    return 0
