"""Without the launcher a rank has a parent process, which lets no run look finished that is not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchtitan_rl.resilience import job_processes

ROOT = Path(__file__).resolve().parents[3]
BEGIN = """
import os, signal, sys, time
from torchtitan_rl.core import events
from torchtitan_rl.resilience.parent import fork_rank
from torchtitan_rl.resilience.rank_status import READING_CONFIG, StatusFile

fork_rank(reading_limit_s=1)
status = StatusFile(0)
events.listen(status)

def say_done():
    status.update(outcome="done")

"""


def start(code, **env):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}  # no test runs under the launcher
    command = [sys.executable, "-c", BEGIN + code]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def end(code, **env):
    """(exit code, stderr) of a process that does `code` after the fork."""
    process = start(code, **env)
    _, said = process.communicate(timeout=30)
    return process.returncode, said


@pytest.mark.parametrize("code", [0, 2, 75])
def test_finished_rank_keeps_its_exit_code(code):
    assert end(f"say_done(); os._exit({code})") == (code, "")


def test_rank_exiting_early_with_0_fails_the_run():
    code, said = end("os._exit(0)", RANK="3")
    assert code == 1
    assert said.startswith("rank 3 ended with code 0 before the end of training: something called os._exit(0).")


@pytest.mark.parametrize(
    ("act", "number", "name"),
    [
        ("signal.alarm(1); time.sleep(10)", 14, "SIGALRM"),
        ("os.kill(os.getpid(), 9)", 9, "SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 1)", 35, "SIGRTMIN+1"),
    ],
)
def test_a_rank_that_a_signal_kills_is_named_with_the_signal(act, number, name):
    code, said = end(act)
    assert code == -number
    assert said.startswith(f"rank 0 was killed by signal {number} ({name}) before the end of training.")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_forwarded_and_the_resulting_exit_is_not_reported(number):
    process = start(f"signal.signal({number}, signal.SIG_DFL); print('begun', flush=True); time.sleep(20)")
    process.stdout.readline()
    process.send_signal(number)
    assert (process.wait(30), process.stderr.read()) == (-number, "")


def test_a_rank_that_handles_a_signal_ends_as_it_wants():
    process = start(
        "signal.signal(15, lambda *_: (say_done(), os._exit(0))); print('begun', flush=True); time.sleep(20)"
    )
    process.stdout.readline()
    process.terminate()
    assert process.wait(30) == 0


def test_the_rank_ends_with_its_parent():
    process = start("print(os.getpid(), flush=True); time.sleep(60)")
    rank = int(process.stdout.readline())
    process.kill()
    process.wait(30)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{rank}/stat").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{rank}/stat").exists()


@pytest.mark.parametrize("begins", ["", "status.update(phase=READING_CONFIG, since=time.monotonic()); "])
@pytest.mark.parametrize("code", [0, 3])
def test_file_that_exits_at_import_is_named(tmp_path, code, begins):
    (tmp_path / "mine.py").write_text(f"import os\nos._exit({code})\n")
    ended, said = end(
        f"from torchtitan_rl.library.references import load_function; {begins}"
        f"load_function({str(tmp_path / 'mine.py:f')!r}, '--config')"
    )
    assert ended == (code or 1)
    assert f"in: import of {tmp_path}/mine.py: something called os._exit({code})" in said


READS = "status.update(phase=READING_CONFIG, since=time.monotonic())\n"


def test_a_config_whose_import_loops_ends_with_its_stack_and_a_sentence(tmp_path):
    began = time.monotonic()
    code, said = end(f"{READS}\ndef loops():\n    while True: pass\nloops()", TMPDIR=str(tmp_path))
    assert code == 1
    assert time.monotonic() - began < 20
    assert "in loops" in said
    assert said.splitlines()[-1] == "rank 0 has read the config for 1 s: an import in it loops or waits. It is ended."
    assert list(tmp_path.iterdir()) == []


def test_time_limit_covers_only_the_config_import():
    assert end(f"{READS}status.update(phase='start'); time.sleep(4); say_done(); os._exit(0)") == (0, "")


def test_ctrl_c_during_imports_prints_no_traceback(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TORCHTITAN_RL_WATCH"}
    command = [sys.executable, "-m", "torchtitan_rl.train", "--list-configs"]
    with (tmp_path / "said").open("w") as said:
        parent = subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)
    deadline = time.monotonic() + 60
    while not any("torch" in Path(f"/proc/{child}/maps").read_text() for child in job_processes.children(parent.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(parent.pid, signal.SIGINT)
    assert parent.wait(20) == -signal.SIGINT
    assert (tmp_path / "said").read_text() == ""
