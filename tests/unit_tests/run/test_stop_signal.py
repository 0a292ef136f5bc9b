"""What asks a run to end: heard between steps, whatever other people's code does with signals, and by nobody else."""

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import termios
import time

import pytest

from torchtitan_rl.run import job_processes
from torchtitan_rl.run.stop_signal import StopSignal


@pytest.fixture
def stop():
    before = {number: signal.getsignal(number) for number in job_processes.STOP_SIGNALS}
    stop = StopSignal()
    stop.requested()
    yield stop
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_process_that_a_reward_forks_ends_by_sigterm_as_pools_end_theirs(stop):
    fork = multiprocessing.get_context("fork")
    began = fork.Event()
    child = fork.Process(target=lambda: began.set() or time.sleep(60))
    child.start()
    began.wait(10)
    child.terminate()
    child.join(10)
    assert child.exitcode == -signal.SIGTERM
    assert stop.number == 0


def test_signal_handler_replaced_by_a_reward_is_restored(stop):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stop.requested()
    signal.raise_signal(signal.SIGTERM)
    assert stop.number == signal.SIGTERM


def test_sighup_is_ignored_under_nohup(stop):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests, too, may run under nohup
    assert signal.SIGHUP in job_processes.stop_signals()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop.requested()
    signal.raise_signal(signal.SIGHUP)
    assert stop.number == 0


def test_signal_during_a_print_is_recorded_without_error():
    """Nobody reads the output, so that the process waits in the middle of a print when the signal comes."""
    code = (
        "from torchtitan_rl.run.stop_signal import StopSignal; "
        "stop = StopSignal(); stop.requested(); print('x' * 10**6, flush=True); print(stop.number)"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, **pipes)
    while int.from_bytes(fcntl.ioctl(process.stdout, termios.FIONREAD, bytes(4)), sys.byteorder) < 2**16:  # a full pipe
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    said, failed = process.communicate(timeout=30)
    assert (process.returncode, failed) == (0, "")
    assert said.splitlines()[-1] == str(int(signal.SIGTERM))
