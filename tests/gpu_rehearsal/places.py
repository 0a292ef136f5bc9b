"""Names the line of the project, or else of torch, that runs now."""

import sys

_OWN = ("gpu_rehearsal", "_python_dispatch", "_ops.py", "fake_tensor.py", "/_dynamo/", "_compile.py", "<", "_stats.py")


def place() -> str:
    """Returns "file:line" of the innermost frame in torchtitan_rl, or the innermost outside this package if there is none."""
    frame, outside = sys._getframe(1), ""
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torchtitan_rl/" in file:
            return f"{file.rpartition('/torchtitan_rl/')[2]}:{frame.f_lineno}"
        if not outside and not any(part in file for part in _OWN):
            outside = f"{file.rpartition('site-packages/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return outside or "?"
