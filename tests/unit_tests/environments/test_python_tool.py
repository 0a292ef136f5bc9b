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


SIGNAL = "import os\nprint('x', flush=True)\nos.kill(os.getpid(), {})"


@pytest.mark.parametrize(
    ("code", "limits", "reason"),
    [
        ("print('before')\n1 / 0", {}, "ended with exit code 1: (?s:before.*line 2, in <module>.*ZeroDivisionError)"),
        ("while True: pass", {"cpu_seconds": 1}, "used more than 1 s of CPU time"),
        (SIGNAL.format(9), {}, r"was killed by signal 9 \(Killed\): x"),
        (SIGNAL.format(35), {}, r"was killed by signal 35 \(Real-time signal 1\): x"),
        ("x = bytearray(2**31)", {}, "(?s:exit code 1.*MemoryError)"),
        ("while True: print('y' * 1000)", {"file_bytes": 100_000}, "printed 100,000 bytes or more: y"),
    ],
)
def test_program_that_fails_or_passes_a_limit_is_an_error_with_what_it_printed(code, limits, reason):
    with pytest.raises(ProgramError, match=reason) as raised:
        run_program(code, ProgramLimits(seconds=60, **limits))
    assert len(str(raised.value)) < 100_100


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


def test_a_command_that_is_not_there_is_an_error_of_the_run_and_not_of_the_policy():
    with pytest.raises(FileNotFoundError, match="there is no program 'no-such-program'"):
        python_tool(command=["no-such-program", "-"])
