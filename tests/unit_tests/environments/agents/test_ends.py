"""Commands as agents: every way to go wrong is an end with a name, the other conversations go on, and nothing is left running."""

import contextlib
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.parts.conversations import ScriptedEngine, conversation, conversations, play, prompts
from torchtitan_rl.conversation import Conversation
from torchtitan_rl.environments.agents import AgentEnvironment, same_path
from torchtitan_rl.environments.pool import ConversationError
from torchtitan_rl.events import WATCH_VARIABLE

ASK = """
import json, os, signal, subprocess, sys, threading, time, urllib.request
def post(path, body, key=os.environ["OPENAI_API_KEY"]):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = os.environ["OPENAI_BASE_URL"] + path
    return json.load(urllib.request.urlopen(urllib.request.Request(url, body, {"Authorization": "Bearer " + key})))
def ask(messages, **more):
    return post("/chat/completions", {"model": "x", "messages": messages, **more})["choices"][0]["message"]
task = json.load(open(os.environ["AGENT_TASK"]))
messages = [{"role": "user", "content": task["question"]}]
"""
"""The beginning of every command here."""

GOOD = """
messages.append(ask(messages))
messages.append({"role": "user", "content": "And again?"})
ask(messages)
json.dump({"reward": 0.5, "columns": {"asked": 2}}, open(os.environ["AGENT_RESULT"], "w"))
"""


def command(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", ASK + code]


@pytest.fixture
def talk(made):
    """Plays one conversation of each command to its end."""

    def talk(*codes: str, seconds: float = 30.0, **config) -> list[Conversation]:
        played = [conversation(prompt) for prompt in prompts(made, len(codes))]

        def make(prompt):
            task = {"question": f"question {prompt.prompt_idx}"}
            return AgentEnvironment(command(codes[prompt.prompt_idx]), task=task, seconds=seconds)

        play(conversations(make, made, **config), ScriptedEngine(made, "x"), played)
        return played

    return talk


@pytest.fixture(autouse=True)
def own_agents(tmp_path, monkeypatch):
    """Agents of this test are told from those of other tests that run at the same time by their temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def left_agents() -> list[str]:
    """This test's processes that were started with an agent's key. What is killed may take a moment to end."""
    mine, deadline = f"TMPDIR={tempfile.gettempdir()}/".encode(), time.monotonic() + 10
    while True:
        left = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environ = (folder / "environ").read_bytes()  # empty for a zombie
                if b"AGENT_TASK=" in environ and mine in environ:
                    left.append(folder.name)
        if not left or time.monotonic() > deadline:
            return left


def test_command_agent_runs_a_conversation_and_writes_its_reward_to_a_file(talk):
    [conversation] = talk(GOOD)
    assert conversation.finish_reason == "stop"
    assert conversation.prompt.messages == [{"role": "user", "content": "question 0"}]
    assert [turn.reward for turn in conversation.turns] == [None, 0.5]
    assert conversation.turns[1].columns == {"asked": 2}
    assert [turn.text for turn in conversation.turns] == ["x", "x"]
    assert conversation.turns[0].messages[0]["content"] == "And again?"


ENDS = {
    "killed": ("ask(messages); os.kill(os.getpid(), signal.SIGKILL)", r"the agent was killed by signal 9 \(Killed\)"),
    "raises": ("ask(messages); raise ValueError('no dice')", "ended with exit code 1: (?s:.*)ValueError: no dice"),
    "hangs": ("ask(messages); time.sleep(99)", "sent no request and did not end within 3 s"),
    "never asks": ("", "the agent ended without a request"),
    "large request": ("ask([{'role': 'user', 'content': 'x' * 17_000_000}])", "exit code 1: (?s:.*)(413|Broken pipe|reset)"),
    "prints": ("while True: print('x' * 100_000)", "printed more than 16,777,216 bytes"),
    "wrong key": ("post('/chat/completions', {'messages': messages}, 'sesame')", "exit code 1: (?s:.*)401"),
    "no JSON": ("post('/chat/completions', b'{')", "its last request was refused: the agent's request cannot be read: JSONDecodeError"),
    "wrong result": ("ask(messages); open(os.environ['AGENT_RESULT'], 'w').write('fine')", "the agent's outcome is not JSON"),
    "infinite reward": ("ask(messages); post('/reward', b'{\"reward\": Infinity}')", "the agent's outcome is not JSON: Out of range"),
    "long message": ("ask([{'role': 'user', 'content': 'x' * 30_000}])", "conversations.max_answer_characters, 20,000"),
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
def test_failing_agent_ends_its_conversation_with_a_reason_and_others_continue(talk, end):
    code, reason = ENDS[end]
    wrong, good = talk(code, GOOD, seconds=3 if end == "hangs" else 30, on_failure="none")
    assert wrong.finish_reason == "env_error"
    assert re.search(reason, wrong.error), wrong.error
    assert (good.finish_reason, good.turns[-1].reward) == ("stop", 0.5)
    assert left_agents() == []


def test_by_default_a_failed_agent_stops_the_run_with_its_reason(talk):
    with pytest.raises(ConversationError, match="AgentEnvironment of prompt .* failed: AgentFailed: the agent ended"):
        talk("sys.exit(3)", GOOD)
    assert left_agents() == []


def test_agents_folder_is_in_the_folder_that_the_launcher_removes(tmp_path, monkeypatch):
    of_job = tmp_path / "of_job"
    of_job.mkdir()
    monkeypatch.setenv(WATCH_VARIABLE, str(of_job))
    assert same_path.new_folder().parent == of_job


SEES = """
subprocess.Popen(['sleep', '99'])
for name in (".", os.environ["HOME"], os.environ["TMPDIR"]):
    assert os.listdir(name) == []
    open(name + "/mine", "w").write("x")
places = [os.getcwd(), *(os.environ[name] for name in ("HOME", "TMPDIR", "AGENT_TASK", "AGENT_RESULT"))]
messages = [{"role": "user", "content": json.dumps(places)}]
"""


@pytest.mark.parametrize("way", [*same_path.WAYS, "none"])
def test_agents_see_their_own_folders_at_one_path_and_leave_nothing(talk, tmp_path, monkeypatch, way):
    monkeypatch.setattr(same_path, "WAYS", {name: prefix for name, prefix in same_path.WAYS.items() if name == way})
    at = tmp_path / f"agent-{os.getuid()}"
    if way != "none" and same_path.placed([], tmp_path) == ([], tmp_path):
        pytest.skip(f"no namespaces {way} on this machine")
    played = talk(SEES + GOOD, SEES + GOOD)
    assert [(one.finish_reason, one.turns[-1].reward) for one in played] == [("stop", 0.5)] * 2
    places = [json.loads(one.prompt.messages[0]["content"]) for one in played]
    assert (
        places[0] == places[1] == [str(at / name) for name in ("work", "home", "tmp", "task.json", "result.json")]
    ) == (way != "none")
    assert left_agents() == []
    assert [*tmp_path.glob("agent-*")] == [at]
    assert [*at.iterdir()] == []


def test_truncated_agent_is_killed_and_its_posted_reward_counts(talk):
    code = (
        "post('/reward', {'reward': 0.25})\nwhile True: messages += [ask(messages), {'role': 'user', 'content': 'y'}]"
    )
    [conversation] = talk(code, max_turns=3)
    assert (conversation.finish_reason, conversation.turns[-1].reward) == ("max_turns", 0.25)
    assert left_agents() == []


REWRITES = """
for text in ("other", "another", "third"):
    ask([{'role': 'user', 'content': text}])
"""


def test_a_rewritten_history_opens_traces_up_to_the_limit_which_keeps_the_reward(talk):
    [whole, cut] = talk(
        f"ask(messages){REWRITES}", f"post('/reward', 0.25)\nask(messages){REWRITES}ask(messages)", max_traces=4
    )
    assert (whole.finish_reason, [turn.trace for turn in whole.turns]) == ("stop", [0, 1, 2, 3])
    traces = whole.completion(0).traces
    assert [trace.messages[0]["content"] for trace in traces[1:]] == ["other", "another", "third"]
    assert [trace.parent for trace in traces] == [None, 0, 1, 2]
    assert (cut.finish_reason, len(cut.traces), cut.turns[-1].reward) == ("max_traces", 4, 0.25)
    assert left_agents() == []


def test_agents_receive_only_allowed_environment_variables(talk, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    [conversation] = talk("messages[0]['content'] = json.dumps(sorted(os.environ)); ask(messages)")
    names = json.loads(conversation.prompt.messages[0]["content"])
    assert {"OPENAI_BASE_URL", "OPENAI_API_KEY", "AGENT_TASK", "AGENT_RESULT", "PATH"} <= set(names)
    assert "WANDB_API_KEY" not in names
