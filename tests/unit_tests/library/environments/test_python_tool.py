"""Programs of the policy: what they print, and each way to exceed a limit."""

import contextlib
import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from torchtitan_rl.common import left_processes
from torchtitan_rl.library.environments import python_tool as python_tool_module
from torchtitan_rl.library.environments.python_tool import ProgramError, ProgramLimits, python_tool, run_program
from torchtitan_rl.library.environments.tools import ToolEnvironment, tool_schemas

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


def test_a_program_s_output_is_the_answer():
    assert run_program("import math\nprint(math.comb(40, 20), 'ä')", LIMITS) == "137846528820 ä\n"


def test_a_program_that_raises_is_an_error_with_its_traceback():
    with pytest.raises(
        ProgramError, match=r"ended with exit code 1: (?s:before.*line 2, in <module>.*ZeroDivisionError)"
    ):
        run_program("print('before')\n1 / 0", LIMITS)


def test_a_program_that_hangs_is_killed_with_what_it_has_started():
    began = time.monotonic()
    code = "import subprocess, time\nprint('here', flush=True)\nsubprocess.Popen(['sleep', '98.7'])\ntime.sleep(99)"
    with pytest.raises(ProgramError, match=r"took longer than 2 s: here"):
        run_program(code, ProgramLimits(seconds=2))
    assert time.monotonic() - began < 15
    assert processes("98.7") == []


def test_a_program_that_computes_for_too_long_is_killed_by_its_cpu_time():
    with pytest.raises(ProgramError, match="used more than 1 s of CPU time"):
        run_program("while True: pass", ProgramLimits(seconds=60, cpu_seconds=1))


@pytest.mark.parametrize(("signal", "name"), [(9, "Killed"), (35, "Real-time signal 1")])
def test_a_program_that_kills_itself_is_named(signal, name):
    with pytest.raises(ProgramError, match=rf"was killed by signal {signal} \({name}\): x"):
        run_program(f"import os\nprint('x', flush=True)\nos.kill(os.getpid(), {signal})", LIMITS)


def test_a_program_that_takes_too_much_memory_gets_a_memory_error():
    with pytest.raises(ProgramError, match="(?s:exit code 1.*MemoryError)"):
        run_program("x = bytearray(2**31)", LIMITS)


def test_a_flood_of_output_ends_at_its_limit():
    with pytest.raises(ProgramError, match="printed 100,000 bytes or more: y") as raised:
        run_program("while True: print('y' * 1000)", ProgramLimits(seconds=20, file_bytes=100_000))
    assert len(str(raised.value)) < 100_100


def test_a_file_has_the_same_limit():
    with pytest.raises(ProgramError, match="File too large"):
        run_program("open('big', 'wb').write(bytes(200_000))", ProgramLimits(seconds=20, file_bytes=100_000))


def test_what_a_program_leaves_running_does_not_delay_the_answer_and_is_killed():
    began = time.monotonic()
    assert run_program("import subprocess\nsubprocess.Popen(['sleep', '97.6'])\nprint('done')", LIMITS) == "done\n"
    assert time.monotonic() - began < 15
    assert processes("97.6") == []


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
def test_a_daemon_that_has_left_the_group_is_killed_too(daemon, ends, monkeypatch):
    monkeypatch.setattr(python_tool_module, "new_mark", lambda: "mark-97.7")
    code = f"import os, subprocess, time\n{daemon.format('97.7')}\n{ends}"
    with contextlib.suppress(ProgramError):
        run_program(code, ProgramLimits(seconds=3))
    assert processes("mark-97.7") == []


def test_a_process_with_a_lower_number_is_found_after_the_kernel_began_anew():
    mark = left_processes.new_mark()
    with subprocess.Popen(["sleep", "60"], env={left_processes.CALL_VARIABLE: mark}, start_new_session=True) as process:
        left_processes.kill_marked_since(mark, process.pid)  # higher ones only
        assert process.poll() is None
        left_processes.kill_marked_since(mark, 2**30)  # the last number given is lower
        assert process.wait(10) == -9


def test_a_program_has_its_own_folder_and_no_variable_of_the_run_but_the_named_ones(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    code = "import json, os\nopen('mine', 'w').write('x')\nprint(json.dumps([os.getcwd(), sorted(os.environ)]))"
    folder, names = json.loads(run_program(code, LIMITS))
    assert "WANDB_API_KEY" not in names
    assert "PATH" in names
    assert not Path(folder).exists()


def test_a_program_reads_no_input_and_a_long_one_is_refused():
    with pytest.raises(ProgramError, match="EOFError"):
        run_program("input()", LIMITS)
    with pytest.raises(ProgramError, match="has 70,000 bytes; expected at most 60,000"):
        run_program("#" * 70_000, LIMITS)


def test_as_a_tool_its_failures_are_the_policy_s_errors():
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


def test_another_command_runs_the_program():
    assert run_program("echo from a shell", LIMITS, command=["sh"]) == "from a shell\n"
