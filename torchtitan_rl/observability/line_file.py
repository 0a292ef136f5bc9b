"""An append-only JSON-lines file that survives kill -9 and resumes without lost or duplicate steps."""

import itertools
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_STEP = re.compile(rb'\{"step": (-?\d+)')


class LineFile:
    """Batches of JSON lines, each batch complete or absent.

    A batch and the `end` that closes it are written by one call. Anything after the last `end` is the partial batch of
    a killed process and is cut off when the file is opened. Every line starts with its step, so that a resumed run can
    truncate the file at the step where it continues. A file with damaged lines is kept under another name, and its other
    lines go on. Raises OSError like any file.
    """

    def __init__(self, path: Path, end: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        if path.exists():
            _set_damage_aside(path, end)
        self._file = self._open()
        whole = _whole_size(path, end)
        if whole < os.fstat(self._file).st_size:
            os.ftruncate(self._file, whole)
        self._end = end
        self._lost_lines = False
        self.size = whole
        """Bytes in the file."""

    def append(self, step: int, lines: list[dict[str, Any]]) -> None:
        """Writes one batch for `step`. NaN and infinity are written as null, lone surrogates as escapes."""
        batch = b"".join(_line(step, line) for line in lines)[:-1] + self._end
        if os.fstat(self._file).st_nlink == 0:
            self._begin_anew()
        rest = memoryview(batch)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            with suppress(OSError):  # the write's error is the one to report
                os.ftruncate(self._file, self.size)  # a partial batch would hide the batches after it
            raise
        self.size += len(batch)

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)

    def _begin_anew(self) -> None:
        """Creates the file again after it was deleted: writes to the old descriptor would be lost."""
        anew = self._open()
        os.close(self._file)
        self._file, self.size, self._lost_lines = anew, 0, True
        logger.warning(f"{self._path.name} was deleted: a new file is started, without the earlier steps")

    def rewind(self, step: int) -> None:
        """Truncates the file before the first line of `step` or a later step."""
        if not self.size:
            return
        offset = 0
        with open(self._path, "rb") as lines:
            for line in lines:
                found = _STEP.match(line)
                if found and int(found[1]) >= step:
                    os.ftruncate(self._file, offset)
                    self.size = offset
                    return
                offset += len(line)

    def close(self) -> None:
        """Closes the file. Says again if earlier lines are lost: the first warning may be hours old."""
        os.close(self._file)
        if self._lost_lines:
            logger.warning(f"{self._path.name} was deleted during the run: its steps before that are lost")


def read_lines(path: Path, end: bytes) -> Iterator[dict[str, Any]]:
    """The lines of all complete batches; none if there is no file. Safe while the file is being written.

    Raises ValueError for a damaged line.
    """
    if not path.exists():
        return
    remaining = _whole_size(path, end)
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            remaining -= len(line)
            if remaining < 0:
                return
            if line.strip():
                row = _object_of(line)
                if row is None:
                    raise ValueError(
                        f"{path}: line {number} is damaged. A resume keeps this file aside and goes on with the other lines."
                    )
                yield row


def _set_damage_aside(path: Path, end: bytes) -> None:
    """Rewrites a file that has damaged lines without them, and keeps the file as it was. Says so."""
    with open(path, "rb") as file:
        size = _whole_size(path, end)
        steps = [_step_of(line) for line in iter(lambda: file.readline() if file.tell() < size else b"", b"")]
    damaged = _damaged(steps)
    if not damaged:
        return
    number = 1
    while (aside := path.with_name(f"{path.stem}.damaged-{number}{path.suffix}")).exists():
        number += 1
    with open(path, "rb") as file, open(rest := path.with_name(f"{path.name}.rest"), "wb") as kept:
        for index, line in enumerate(file):
            if index < len(steps) and index not in damaged:
                kept.write(line)
    if rest.stat().st_size:
        os.truncate(rest, rest.stat().st_size - 1)  # the last line may have been the end of a batch
        with open(rest, "ab") as kept:
            kept.write(end)
    path.rename(aside)
    rest.rename(path)
    shown = ", ".join(str(index + 1) for index in sorted(damaged)[:10])
    logger.warning(
        f"{path.name}: {len(damaged)} of {len(steps)} lines are damaged (lines {shown}); the file as it was is kept as "
        f"{aside.name}, and the run goes on with the other lines"
    )


def _step_of(line: bytes) -> int | None:
    """The step of a line; None if it is damaged."""
    found = _STEP.match(line)
    return int(found[1]) if found and _object_of(line) is not None else None


def _object_of(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None if it is damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and "step" in row else None


def _damaged(steps: list[int | None]) -> set[int]:
    """The indices of unreadable lines, and of lines whose step is out of order. A late step would cut off all that follow."""
    readable = [index for index, step in enumerate(steps) if step is not None]
    in_doubt = {index for pair in itertools.pairwise(readable) if steps[pair[1]] < steps[pair[0]] for index in pair}
    return in_doubt | (set(range(len(steps))) - set(readable))


def _line(step: int, line: dict[str, Any]) -> bytes:
    ordered = {"step": step, **{key: value for key, value in line.items() if key != "step"}}
    try:
        text = json.dumps(ordered, allow_nan=False)
    except ValueError:
        text = json.dumps(_without_nan(ordered), allow_nan=False)
    return text.encode("ascii") + b"\n"


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
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
            found = tail.rfind(end)
            if found >= 0:
                return start + found + len(end)
            position = start
    return 0
