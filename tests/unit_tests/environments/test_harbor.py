"""Tasks in Harbor's form: which are kept, what a sandbox allows, and what the tests' reward is."""

import shutil
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from tests.parts.harbor_tasks import LEFT_OUT, TEN, write_left_out, write_ten
from tests.unit_tests.docs.test_conversations import talk
from tests.unit_tests.environments.test_python_tool import sleeping
from torchtitan_rl.configs.tasks import harbor
from torchtitan_rl.configs.toys.word_tasks import check, write_task, write_tasks
from torchtitan_rl.data.tool_calls import ToolCall
from torchtitan_rl.environments.harbor.harbor_task import Harbor
from torchtitan_rl.environments.harbor.sandbox import SandboxConfig, chosen_engine, open_sandbox, read_reward
from torchtitan_rl.environments.harbor.shell import blocks
from torchtitan_rl.environments.harbor.task_folder import LeftOut, read_instruction
from torchtitan_rl.errors import UserError

SMALL = SandboxConfig(engine="bubblewrap", memory_mb=256, storage_mb=16, command_seconds=5.0)
needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")


@pytest.fixture
def word(tmp_path: Path) -> Path:
    """A task: write hello into out.txt."""
    write_ten(tmp_path)
    return tmp_path / "word"


@needs_bubblewrap
def test_solutions_of_the_tasks_kept_get_1_and_empty_attempts_0(tmp_path):
    write_ten(tmp_path)
    task = Harbor.Config(path=str(tmp_path), sandbox=SMALL).build()
    task.leave_out(lambda examples: [None] * len(examples))
    lines = {line.partition(": ")[0]: line for line in task.rehearse()}
    assert lines == {name: f"{name}: reward 1 for its solution, 0 for nothing" for name in TEN}


@needs_bubblewrap
def test_tasks_that_need_more_are_left_out_by_name_and_reason(tmp_path, capsys):
    write_ten(tmp_path)
    write_left_out(tmp_path)
    Harbor.Config(path=str(tmp_path), sandbox=SMALL).build().leave_out(lambda examples: [None] * len(examples))
    shown = capsys.readouterr().out
    for name, (_, reason) in LEFT_OUT.items():
        assert f"1 {reason}" in shown
        assert f"(row {name})" in shown
    assert not any(f"(row {name})" in shown for name in TEN)


@needs_bubblewrap
@pytest.mark.parametrize(("other", "ranks"), [("this node", [0, 1]), ("another node", [0])])
def test_tasks_with_one_instruction_are_kept_and_the_ranks_of_a_node_share_the_sandboxes(
    word, one_rank, monkeypatch, capsys, other, ranks
):
    """Those of this group: with generators on ranks of their own, the node has others, which share among themselves."""
    shutil.copytree(word, word.with_name("word_again"))
    module, opened = "torchtitan_rl.environments.harbor.harbor_task", []
    monkeypatch.setattr(Harbor, "_fault", lambda self, folder: opened.append(folder.name))
    monkeypatch.setattr(f"{module}.gethostname", lambda: "this node")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")

    def gathered(mine):
        return ["this node", other] if mine == ["this node"] else [*mine, (0, "that another rank cannot open")]

    monkeypatch.setattr(f"{module}.all_gather_lists", gathered)
    for rank in ranks:
        monkeypatch.setattr("torch.distributed.get_rank", partial(int, rank))
        task = Harbor.Config(path=str(word.parent), sandbox=SMALL).build()
        task.leave_out(lambda examples: [None] * len(examples))
    assert sorted(opened) == sorted([*TEN, "word_again"])
    assert "that another rank cannot open" in capsys.readouterr().out


def test_benchmark_marks_are_not_shown(tmp_path):
    write_ten(tmp_path)
    assert read_instruction(tmp_path / "canary") == "Make the folder /app/new."


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("I look.\n```bash\nls\npwd\n```\nThen:\n```sh\ncat a\n```", "ls\npwd\ncat a\n"),
        ("```bash\n```\nrm is no part of a block that is empty.", ""),
        ("```shell\nls", "ls"),
    ],
)
def test_blocks_of_a_message_are_one_command(text, command):
    assert blocks(text, ()) == [ToolCall("bash", {"command": command})]


@needs_bubblewrap
@pytest.mark.parametrize(
    ("command", "seen"),
    [
        ("pwd; id -u; ls /", "/app\n0\napp\nbin\ndev\netc\nlib\nlib64\nlogs\nproc\nroot\nsbin\ntmp\nusr\n"),
        ("touch /usr/x", "touch: cannot touch '/usr/x': Read-only file system\n\n(exit code 1)"),
        ("cat < /dev/tcp/1.1.1.1/53", "bash: connect: Network is unreachable"),
        ("dd if=/dev/zero of=/big bs=1M count=99 2>&1 | head -n 1", "dd: error writing '/big': No space left on device"),
        ("dd if=/dev/zero of=/dev/shm/x bs=1M count=99 2>&1 | head -n 1", "dd: error writing '/dev/shm/x': No space"),
        ("python3 -c 'bytearray(2**30)' 2>&1 | tail -n 1", "MemoryError\n"),
        ("for i in $(seq 400); do sleep 9 & done > /dev/null", "bash: fork: retry: Resource temporarily unavailable"),
        ("mkdir -p /m; mount -t tmpfs x /m 2>&1 | head -n 1; unshare -rm true", "mount: /m: "),
        ("unshare -rm true", "unshare: unshare failed: No space left on device"),
        ("echo a; sleep 99", "a\n\n(exit code 124)"),
        ("yes", "y\ny\ny\n"),
        ("env | grep -c TORCH", "0\n"),
    ],
)  # fmt: skip
def test_sandbox_limits_a_command(word, command, seen):
    with closing(open_sandbox(word, SMALL)) as sandbox:
        printed = sandbox.bash(command)
    assert printed.startswith(seen)
    assert len(printed) < 40_000


@needs_bubblewrap
def test_files_and_processes_stay_until_the_sandbox_is_closed(word):
    sandbox = open_sandbox(word, SMALL)
    sandbox.bash("sleep 76543 > /dev/null 2>&1 & echo kept > /tmp/x")
    assert sandbox.bash("cat /tmp/x") == "kept\n"
    assert sleeping("76543")
    sandbox.close()
    deadline = time.monotonic() + 10
    while sleeping("76543") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not sleeping("76543")


@pytest.mark.parametrize(
    ("text", "reward"),
    [("1\n", 1), (".5", 0.5), ('{"reward": 0.25, "speed": 3}', 0.25), ('{"accuracy": 1.0}', 1)],
)
def test_reward_is_read_as_harbor_reads_it(text, reward):
    assert read_reward(text) == reward


NO_REWARDS = ["", "yes", "nan", "1e400", "null", "{}", '{"a": 1, "b": 2}', '{"reward": "x"}', '{"reward": null}']


@pytest.mark.parametrize("text", NO_REWARDS)
def test_reward_that_harbor_refuses_is_refused(text):
    with pytest.raises((ValueError, TypeError, KeyError)):
        read_reward(text)


@needs_bubblewrap
@pytest.mark.parametrize(
    ("tests", "reason"),
    [("exit 0", "could not convert string to"), ("echo 1 > /logs/verifier/reward.txt; sleep 60", "took too long")],
)
def test_tests_without_a_reward_count_as_0_and_are_logged(tmp_path, caplog, tests, reason):
    write_task(tmp_path, "Do.", tests, "true", **{"task.toml": "[verifier]\ntimeout_sec = 2\n"})
    with closing(open_sandbox(tmp_path, SMALL)) as sandbox:
        sandbox.bash("echo 1 > /logs/verifier/reward.txt")  # the policy's own reward is removed
        assert sandbox.reward() == 0
    assert reason in caplog.text


@needs_bubblewrap
def test_commands_together_have_the_tasks_time(tmp_path):
    write_task(tmp_path, "Do.", "true", "true", **{"task.toml": "[agent]\ntimeout_sec = 3\n"})
    with closing(open_sandbox(tmp_path, SMALL)) as sandbox:
        sandbox.bash("sleep 1")
        assert sandbox.bash("sleep 60").endswith("(exit code 124)")
        with pytest.raises(TimeoutError, match="the time for this task is over"):
            sandbox.bash("true")


CALL = '<tool_call>{"name": "bash", "arguments": {"command": "%s"}}</tool_call>'


@needs_bubblewrap
@pytest.mark.parametrize(
    ("role", "said"),
    [("user", "I look.\n```bash\nls\npwd\n```"), ("tool", CALL % "ls" + CALL % "pwd")],
)
def test_policy_plays_until_a_message_has_no_command(tmp_path, role, said):
    write_task(tmp_path / "a", "Make x.", check("[ -e x ]"), "true")
    write_task(tmp_path / "b", "Make x now.", check("[ -e x ]"), "true")
    config = harbor()
    config.task.path, config.task.role, config.task.sandbox = str(tmp_path), role, SMALL
    make = "```sh\ntouch x\n```" if role == "user" else CALL % "touch x"
    _, scored = talk(config, said, make, "Done.")
    turns = scored.completion.messages
    assert [turn["role"] for turn in turns] == (
        ["assistant", "user", "assistant", "user", "assistant"]
        if role == "user"
        else ["assistant", "tool", "tool", "assistant", "tool", "assistant"]
    )
    assert [turn["content"] for turn in turns if turn["role"] != "assistant"] == (
        ["/app\n", "(no output)"] if role == "user" else ["(no output)", "/app\n", "(no output)"]
    )
    assert (scored.reward, scored.correct, scored.completion.finish_reason) == (1.0, None, "stop")
    assert talk(config, "Done.")[1].reward == 0
    config.conversations.max_turns = 1
    assert talk(config, make)[1].reward == 1  # also where a limit ends it


AGENT = """
import json, os, subprocess
from openai import OpenAI
task = json.load(open(os.environ["AGENT_TASK"]))
messages = [{"role": "user", "content": task["instruction"]}]
reply = OpenAI(timeout=None).chat.completions.create(model="policy", messages=messages).choices[0].message
subprocess.run([*task["shell"], reply.content])
json.dump({"reward": 5}, open(os.environ["AGENT_RESULT"], "w"))
"""


@needs_bubblewrap
def test_agent_runs_its_commands_in_the_sandbox(tmp_path):
    write_tasks(tmp_path / "tasks")
    (tmp_path / "agent.py").write_text(AGENT)
    config = harbor()
    config.task.path, config.task.agent = str(tmp_path / "tasks"), [sys.executable, str(tmp_path / "agent.py")]
    _, scored = talk(config, "echo wrong > word.txt; touch *.txt")
    assert scored.reward == 0
    [prompt, _] = talk(config, "x")
    word, name = prompt.messages[0]["content"].removesuffix(".").split()[3::4]
    assert talk(config, f"echo {word} > {name}")[1].reward == 1


DOCKER = """#!/bin/bash
printf '%s\\n' "$(printf '%q ' "$@")" >> "$0.log"
[[ $1 == "$SLOW" ]] && sleep 9
[[ $1 == build || $1 == run ]] && echo "WARNING: No swap limit support" >&2
[[ "$*" == *"$FAILS"* && $FAILS ]] && echo why && exit 1
case $1 in build) echo sha256:1;; run) echo container;; exec) [[ "$*" == *"cat reward.json"* ]] && echo 1;; esac; exit 0
"""


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """A docker that notes its commands in docker.log."""
    docker = tmp_path / "docker"
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(shutil.which('bash')).parent}:/usr/bin")
    chosen_engine.cache_clear()
    yield
    chosen_engine.cache_clear()


def test_docker_gets_these_commands(docker, tmp_path, monkeypatch):
    toml = '[environment]\nenv = {A = "b c"}\nmemory_mb = 512\nworkdir = "/work"\n[verifier]\nenv = {X = "1"}\n'
    write_task(tmp_path / "task", "Do.", "true", "true", **{"task.toml": toml})
    with closing(open_sandbox(tmp_path / "task", SandboxConfig())) as sandbox:
        assert sandbox.bash("ls") == "(no output)"
        sandbox.reward()
    lines = (tmp_path / "docker.log").read_text().splitlines()
    assert lines[:4] == [
        "ps ",
        f"build --quiet {tmp_path}/task/environment ",
        "run --detach --rm --init --memory=512m --memory-swap=512m --cpus=1 --pids-limit=256 --network=none --env=A=b\\ c "
        "sha256:1 sleep 21600 ",
        "exec container mkdir -p /logs/agent /logs/verifier /logs/artifacts /work ",
    ]
    assert lines[4].startswith(
        "exec --interactive --workdir=/work container bash -c timeout\\ -k\\ 1\\ 60\\ bash\\ -c\\ ls"
    )
    assert [line for line in lines if "test.sh" in line][0].startswith(
        "exec --interactive --workdir=/work --env=X=1 container"
    )
    assert lines[-1] == "rm --force container "
    monkeypatch.setenv("FAILS", "exec container mkdir")
    with pytest.raises(LeftOut, match=r"whose folders were not made \(why\)"):
        open_sandbox(tmp_path / "task", SandboxConfig())
    assert (tmp_path / "docker.log").read_text().splitlines()[-1] == "rm --force container "  # none is left running


def test_task_whose_image_takes_too_long_is_left_out(docker, tmp_path, monkeypatch):
    monkeypatch.setenv("SLOW", "build")
    write_task(tmp_path / "task", "Do.", "true", "true", **{"task.toml": "[environment]\nbuild_timeout_sec = 0.5\n"})
    with pytest.raises(LeftOut, match=r"for which docker build failed \(no end within 0.5 s\)"):
        open_sandbox(tmp_path / "task", SandboxConfig())


def test_no_sandbox_and_no_tasks_are_told_at_once(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="task.path = 'none': expected a folder of tasks"):
        Harbor.Config(path="none").build()
    monkeypatch.setenv("PATH", str(tmp_path))
    chosen_engine.cache_clear()
    with pytest.raises(UserError, match="task.sandbox.engine = 'auto': expected docker or podman"):
        chosen_engine("auto")
    chosen_engine.cache_clear()
    with pytest.raises(LeftOut, match="without task.toml"):
        open_sandbox(tmp_path, SandboxConfig())
