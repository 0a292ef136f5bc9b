"""Programs of the policy: what they print, and each way to exceed a limit."""

import contextlib
import json
import os
import time
from pathlib import Path

import pytest

from torchtitan_rl.data.tool_schemas import tool_schemas
from torchtitan_rl.environments import python_tool as python_tool_module
from torchtitan_rl.environments.python_tool import ProgramError, ProgramLimits, python_tool, run_program
from torchtitan_rl.environments.tools import ToolEnvironment

LIMITS = ProgramLimits(seconds=20, cpu_seconds=10)


def processes(word: str) -> list[str]:
    """The living processes with this word in their command or their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if word.encode() in text and state != "Z" and folder.name != str(os.getpid()):
            found.append(folder.name)
    return found


def left(word: str) -> list[str]:
    """Those of `processes` that do not end: what is killed may take a moment."""
    deadline = time.monotonic() + 10
    while (found := processes(word)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def test_program_output_is_the_tool_answer():
    assert run_program("import math\nprint(math.comb(40, 20), 'ä')", LIMITS) == "137846528820 ä\n"


def test_a_program_that_raises_is_an_error_with_its_traceback():
    with pytest.raises(
        ProgramError, match=r"ended with exit code 1: (?s:before.*line 2, in <module>.*ZeroDivisionError)"
    ):
        run_program("print('before')\n1 / 0", LIMITS)


def test_hanging_program_is_killed_with_its_child_processes():
    began = time.monotonic()
    code = "import subprocess, time\nprint('here', flush=True)\nsubprocess.Popen(['sleep', '98.7'])\ntime.sleep(99)"
    with pytest.raises(ProgramError, match=r"took longer than 2 s: here"):
        run_program(code, ProgramLimits(seconds=2))
    assert time.monotonic() - began < 15
    assert left("98.7") == []


def test_program_over_its_cpu_time_limit_is_killed():
    with pytest.raises(ProgramError, match="used more than 1 s of CPU time"):
        run_program("while True: pass", ProgramLimits(seconds=60, cpu_seconds=1))


@pytest.mark.parametrize(("signal", "name"), [(9, "Killed"), (35, "Real-time signal 1")])
def test_program_killed_by_its_own_signal_is_reported(signal, name):
    with pytest.raises(ProgramError, match=rf"was killed by signal {signal} \({name}\): x"):
        run_program(f"import os\nprint('x', flush=True)\nos.kill(os.getpid(), {signal})", LIMITS)


def test_program_over_its_memory_limit_gets_a_memory_error():
    with pytest.raises(ProgramError, match="(?s:exit code 1.*MemoryError)"):
        run_program("x = bytearray(2**31)", LIMITS)


def test_program_output_is_limited():
    with pytest.raises(ProgramError, match="printed 100,000 bytes or more: y") as raised:
        run_program("while True: print('y' * 1000)", ProgramLimits(seconds=20, file_bytes=100_000))
    assert len(str(raised.value)) < 100_100


DAEMON = "subprocess.Popen(['sleep', '{0}'], start_new_session=True)"
"""A child that leaves the group."""
FORKED_DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while not os.path.exists('/gone {0}'): time.sleep(0.1)
    os._exit(0)
os.wait()
"""
"""The usual double fork: its parent is another process by now."""


@pytest.mark.parametrize("ends", ["print('done')", "while True: pass"])
@pytest.mark.parametrize("daemon", [DAEMON, FORKED_DAEMON])
def test_daemon_outside_the_process_group_is_killed(daemon, ends, monkeypatch):
    monkeypatch.setattr(python_tool_module, "new_mark", lambda: "mark-97.7")
    code = f"import os, subprocess, time\n{daemon.format('97.7')}\n{ends}"
    with contextlib.suppress(ProgramError):
        run_program(code, ProgramLimits(seconds=3))
    assert left("mark-97.7") == []


def test_program_has_its_own_folder_and_only_allowed_environment_variables(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    code = "import json, os\nopen('mine', 'w').write('x')\nprint(json.dumps([os.getcwd(), sorted(os.environ)]))"
    folder, names = json.loads(run_program(code, LIMITS))
    assert "WANDB_API_KEY" not in names
    assert "PATH" in names
    assert not Path(folder).exists()


def test_python_tool_failures_are_shown_to_the_policy():
    tool = python_tool(LIMITS)
    [schema] = tool_schemas([tool])
    assert (schema["function"]["name"], list(schema["function"]["parameters"]["properties"])) == ("python", ["code"])
    calls = [{"name": "python", "arguments": {"code": code}} for code in ("print(6 * 7)", "nonsense")]
    text = "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
    turn = ToolEnvironment([tool], seconds=30).step({"role": "assistant", "content": text})
    answers = [message["content"] for message in turn.messages]
    assert answers[0] == "42\n"
    assert answers[1].startswith("error: ProgramError: the program ended with exit code 1: Traceback")
    assert turn.columns == {"tool_calls": 2, "tool_errors": 1}
