"""What asks a run to end: heard between steps, whatever other people's code does with signals, and by nobody else."""

import multiprocessing
import signal
import time

import pytest

from torchtitan_rl.resilience import job_processes
from torchtitan_rl.resilience.stop_signal import StopSignal


@pytest.fixture
def stop(tmp_path):
    before = {number: signal.getsignal(number) for number in job_processes.STOP_SIGNALS}
    yield StopSignal(failure_marker=tmp_path / "failed")
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


def test_a_handler_that_a_reward_has_set_is_taken_back(stop):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stop.arm()
    signal.raise_signal(signal.SIGTERM)
    assert stop.number == signal.SIGTERM


def test_under_nohup_the_end_of_the_terminal_is_not_heard(stop):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests, too, may run under nohup
    assert signal.SIGHUP in job_processes.stop_signals()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop.arm()
    signal.raise_signal(signal.SIGHUP)
    assert stop.number == 0
