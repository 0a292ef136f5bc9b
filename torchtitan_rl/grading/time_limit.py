"""A time limit that really ends a call: an endless loop and a runaway regular expression alike."""

import logging
import signal
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

_AGAIN_AFTER_SECONDS = 0.5


class _Expired(BaseException):
    """Not an Exception, so that `except Exception` in the called function does not swallow it."""


def call_with_time_limit(function: Callable[[], T], seconds: float) -> T:
    """What `function` returns. Raises TimeoutError when it takes longer than `seconds`; 0 means without limit.

    The call stays in the main thread and is ended by SIGALRM. A helper thread could neither end an endless loop nor
    interrupt a regular expression, which holds the interpreter's lock, and libraries that set an alarm themselves (as
    math_verify does) refuse to run in one. Native code that never returns to the interpreter cannot be ended. Off the
    main thread there is no limit, as signals reach only the main one.
    """
    if seconds <= 0:
        return function()
    if threading.current_thread() is not threading.main_thread():
        logger.warning("Off the main thread a reward function has no time limit; grader.time_limit_seconds is unused.")
        return function()
    armed = True

    def on_alarm(signum: int, frame: object) -> None:
        if armed:
            raise _Expired

    previous_handler = signal.signal(signal.SIGALRM, on_alarm)
    # Repeated, as a bare `except:` or a destructor may swallow the first one.
    previous_timer = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_AFTER_SECONDS)
    try:
        try:
            return function()
        finally:
            armed = False
    except _Expired:
        raise TimeoutError(f"took longer than {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, *previous_timer)
        signal.signal(signal.SIGALRM, previous_handler)
