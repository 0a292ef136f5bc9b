"""Programs of the policy: what they print, and each way to exceed a limit."""

import contextlib
import json
import time
from pathlib import Path

import pytest

from torchtitan_rl.data.tool_schemas import tool_schemas
from torchtitan_rl.environments.python_tool import ProgramError, ProgramLimits, python_tool, run_program
from torchtitan_rl.environments.tools import ToolEnvironment

LIMITS = ProgramLimits(seconds=20, cpu_seconds=10)


def sleeping(seconds: str) -> bool:
    """Whether a process lives that has called `sleep`. A zombie has no command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes() == f"sleep\0{seconds}\0".encode():
                return True
    return False


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
    deadline = time.monotonic() + 10  # what is killed may take a moment to end
    while sleeping("98.7"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


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
