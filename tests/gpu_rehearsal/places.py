"""Names the line of the project, or else of torch, that runs now."""

import sys
from pathlib import Path

_PACKAGE = f"{Path(__file__).resolve().parents[2]}/torchtitan_rl/"

_OWN = ("gpu_rehearsal", "_python_dispatch", "_ops.py", "fake_tensor.py", "/_dynamo/", "_compile.py", "<", "_stats.py")


def place() -> str:
    """Returns "file:line" of the innermost frame in torchtitan_rl, or the innermost outside this package if there is none."""
    frame, outside = sys._getframe(1), ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):  # the checkout's own folder may have the same name
            return f"{file.removeprefix(_PACKAGE)}:{frame.f_lineno}"
        if not outside and not any(part in file for part in _OWN):
            outside = f"{file.rpartition('site-packages/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return outside or "?"
