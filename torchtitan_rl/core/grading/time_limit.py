"""A time limit that ends a call of Python: an endless loop, a sleep and a runaway regular expression alike.

SIGALRM would serve but for one thing: a process has one alarm, and what is called may want it. math_verify sets it, and
clears it when it is done, and then nothing ends the call any more. So the limit has a timer and a signal of its own.
Native code that never comes back to the interpreter is ended by `grading.worker` alone.
"""

import ctypes
import logging
import signal
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

_SIGNAL = signal.SIGRTMAX - 4  # nobody's: Python, torch and vLLM use no real-time signals
_AGAIN_AFTER_SECONDS = 0.5
_CLOCK_MONOTONIC = 1


class Expired(BaseException):
    """Not an Exception, so that `except Exception` in the called function does not swallow it."""


class _Event(ctypes.Structure):
    """C's sigevent; SIGEV_SIGNAL is 0."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    ]


class _Times(ctypes.Structure):
    """C's itimerspec: interval and first, each in seconds and nanoseconds."""

    _fields_ = [(name, ctypes.c_long) for name in ("again_s", "again_ns", "first_s", "first_ns")]


class _Timer:
    """A POSIX timer of this process that sends `_SIGNAL`, once and then again and again."""

    def __init__(self) -> None:
        self._c = ctypes.CDLL(None, use_errno=True)
        self._id = ctypes.c_void_p()
        self._do("timer_create", _CLOCK_MONOTONIC, ctypes.byref(_Event(signo=_SIGNAL)), ctypes.byref(self._id))

    def set(self, seconds: float) -> None:
        """Fire after `seconds` from now; 0 disarms."""
        again, first = (divmod(int(s * 1e9), 10**9) for s in (_AGAIN_AFTER_SECONDS if seconds else 0, seconds))
        self._do("timer_settime", self._id, 0, ctypes.byref(_Times(*again, *first)), None)

    def close(self) -> None:
        self._do("timer_delete", self._id)

    def _do(self, name: str, *args: object) -> None:
        if getattr(self._c, name)(*args):
            raise OSError(ctypes.get_errno(), f"{name} failed")


def call_with_time_limit(function: Callable[[], T], seconds: float) -> T:
    """What `function` returns. Raises TimeoutError when it takes longer than `seconds`; 0 means without limit.

    The call stays in the main thread, where a signal interrupts what holds the interpreter's lock, as a regular expression
    does, and where libraries may set their own alarms. Off the main thread there is no limit: signals reach only that one.
    """
    if seconds <= 0:
        return function()
    if threading.current_thread() is not threading.main_thread():
        logger.warning("Off the main thread a reward function has no time limit; grader.time_limit_seconds is unused.")
        return function()
    armed = True

    def on_signal(signum: int, frame: object) -> None:
        if armed:
            raise Expired

    previous = signal.signal(_SIGNAL, on_signal)
    timer = _Timer()
    try:
        try:
            # Repeated, as a bare `except:` or a destructor may swallow the first one.
            timer.set(seconds)
            return function()
        finally:
            armed = False
    except Expired:
        raise TimeoutError(f"took longer than {seconds:g} s") from None
    finally:
        timer.close()
        # Not the default: one that is still on its way would end the process.
        signal.signal(_SIGNAL, signal.SIG_IGN if previous is signal.SIG_DFL else previous)
