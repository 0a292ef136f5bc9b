"""Rewards that do what no reward should, from the second step on, on the rank that BAD_RANK names (default: each)."""

import os
import signal
import subprocess
import sys
import time


def _bad(trainer_state) -> bool:
    return trainer_state.global_step >= 2 and os.environ.get("RANK") == os.environ.get(
        "BAD_RANK", os.environ.get("RANK")
    )


def _ordinary(completions):
    return [float(len(completion) % 3) for completion in completions]


def exits(completions, trainer_state, **_):
    """Asks the interpreter to end, successfully."""
    if _bad(trainer_state):
        sys.exit(0)
    return _ordinary(completions)


def vanishes(completions, trainer_state, **_):
    """Ends the process on the spot, successfully."""
    if _bad(trainer_state):
        os._exit(0)
    return _ordinary(completions)


def is_killed(completions, trainer_state, **_):
    """Ends the fifth process of a node as the out-of-memory killer does."""
    if trainer_state.global_step >= 2 and os.environ["LOCAL_RANK"] == "4":
        os.kill(os.getpid(), signal.SIGKILL)
    return _ordinary(completions)


def hangs(completions, trainer_state, **_):
    """Never returns, in a call that swallows what would end it."""
    while _bad(trainer_state):
        try:
            time.sleep(1000)
        except Exception:
            continue
    return _ordinary(completions)


def leaves_a_child(completions, trainer_state, **_):
    """Starts a process in a session of its own, as a sandbox would, and forgets it."""
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return _ordinary(completions)


def raises(completions, trainer_state, **_):
    """Fails like a reward function with a bug."""
    if _bad(trainer_state):
        raise KeyError("no such unit: furlong")
    return _ordinary(completions)
