"""Agents that speak HTTP to a policy whose turns the test says itself: requests, streams, refusals, rewards, history."""

import asyncio
import json
import queue
import socket
import threading

import httpx
import openai
import pytest

from torchtitan_rl.core.generator import SamplingConfig
from torchtitan_rl.core.generator.conversation import Conversation, Sampled
from torchtitan_rl.core.types import Prompt
from torchtitan_rl.library.agents import AgentEnvironment, connections
from torchtitan_rl.library.agents.gateway import gateway
from torchtitan_rl.library.agents.protocol import AgentError
from torchtitan_rl.library.environments.tool_calls import parse_calls

USER = {"role": "user", "content": "What is 3 * 4?"}
TOOL = {"type": "function", "function": {"name": "multiply", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 3, "b": 4}}</tool_call>'


class Policy:
    """The policy's side of one agent's conversation."""

    def __init__(self, agent, **settings) -> None:
        self.conversation = Conversation(
            prompt=Prompt(prompt_idx=0, text="?", token_ids=[1, 2, 3], expected_answer="", messages=[USER]),
            sample_idx=0, sampling=SamplingConfig(max_tokens=100), most_in_turn=50, most_tokens=1000,
        )  # fmt: skip
        self.environment = AgentEnvironment(agent, **settings)
        self.environment.fit(
            conversation=self.conversation, call_seconds=20, most_characters=1000, parser=parse_calls,
            begins_thinking=False,
        )  # fmt: skip

    def __enter__(self):
        self.opening = self.environment.reset()
        return self

    def __exit__(self, *_) -> None:
        self.final = self.environment.close("stop")

    def say(self, text: str):
        self.conversation.append_turn(Sampled(0, [7, 8], [-0.5, -0.5], text, "stop"))
        return self.environment.step({"role": "assistant", "content": text})


def client(base_url: str, api_key: str, **settings) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, **settings)


def asks(*requests, seen: queue.SimpleQueue | None = None):
    """An agent that sends these requests one after another; each is a dict or made of the last message."""

    async def agent(task, *, base_url, api_key):
        message = None
        for request in requests:
            given = request if isinstance(request, dict) else request(message)
            chat = client(base_url, api_key).chat.completions
            response = await chat.create(**{"model": "any", **given})
            message = response.choices[0].message.model_dump(exclude_none=True)
            if seen is not None:
                seen.put(response)

    return agent


def test_policy_turn_is_the_response_and_appended_messages_are_the_environment_answer():
    seen = queue.SimpleQueue()

    def answered(message):
        assert message["tool_calls"][0]["function"] == {"name": "multiply", "arguments": '{"a": 3, "b": 4}'}
        tool = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "12"}
        return {"messages": [USER, message, tool], "tools": [TOOL]}

    with Policy(asks({"messages": [USER], "tools": [TOOL]}, answered, seen=seen)) as policy:
        assert policy.opening == [USER]
        assert policy.opening.tools == [TOOL]
        turn = policy.say(f"<think>hm</think>I multiply. {CALL}")
        assert turn.messages == [{"role": "tool", "name": "multiply", "content": "12"}]
        assert not turn.done
        assert policy.say("It is 12.").done
    first, last = seen.get(timeout=30), seen.get(timeout=30)
    assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("I multiply.", "tool_calls")
    assert (last.choices[0].message.content, last.choices[0].finish_reason) == ("It is 12.", "stop")
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (3, 2)


def test_unparsable_tool_call_has_the_reason_as_arguments():
    seen = queue.SimpleQueue()
    with Policy(asks({"messages": [USER], "tools": [TOOL]}, seen=seen)) as policy:
        policy.say("<tool_call>{broken</tool_call>")
    [call] = seen.get(timeout=30).choices[0].message.tool_calls
    assert call.function.arguments.startswith("the call is not valid JSON")


def test_streamed_response_equals_the_plain_response():
    seen = queue.SimpleQueue()

    async def agent(task, *, base_url, api_key):
        options = {"stream": True, "stream_options": {"include_usage": True}}
        for tools in ({"tools": [TOOL]},):
            async for chunk in await client(base_url, api_key).chat.completions.create(
                model="x", messages=[USER], **tools, **options
            ):
                seen.put(chunk)

    with Policy(agent) as policy:
        assert policy.say(f"Well. {CALL}").done
    chunks = [seen.get(timeout=30) for _ in range(3)]
    assert chunks[0].choices[0].delta.content == "Well."
    assert chunks[0].choices[0].delta.tool_calls[0].function.name == "multiply"
    assert chunks[1].choices[0].finish_reason == "tool_calls"
    assert chunks[2].usage.total_tokens == 5


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"temperature": 0.2}, "asked for temperature 0.2; this run has 1.0: leave it out"),
        ({"n": 2}, "asked for n 2; this run has 1"),
        ({"max_tokens": 49}, "asked for max_tokens 49; a turn of this run has up to 50"),
        ({"seed": 3}, "asked for seed, which is not supported"),
        ({"logprobs": True}, "asked for logprobs True"),
        ({"tool_choice": "required", "tools": [TOOL]}, "asked for tool_choice 'required'"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "the message .*robot"),
        ({"messages": []}, "the agent's request has no messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "the content .*expected text"),
    ],
)
def test_unsupported_request_settings_are_refused_with_a_reason(setting, reason):
    seen = queue.SimpleQueue()

    async def agent(task, *, base_url, api_key):
        try:
            await client(base_url, api_key).chat.completions.create(**{"model": "x", "messages": [USER], **setting})
        except openai.BadRequestError as error:
            seen.put(error.message)

    policy = Policy(agent)
    with pytest.raises(AgentError, match=reason):
        policy.__enter__()
    assert seen.get(timeout=30)
    policy.environment.close("env_error")


def test_request_settings_equal_to_the_runs_are_accepted():
    same = {"temperature": 1, "top_p": 1.0, "n": 1, "max_tokens": 50, "user": "u", "tool_choice": "auto"}
    with Policy(asks({"messages": [USER], **same})) as policy:
        assert policy.say("12").done


SAID = {"role": "assistant", "content": "12"}
NEXT = {"role": "user", "content": "And 5 * 6?"}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([USER, {**SAID, "content": "13"}, NEXT], 'changed message 2 of its history: .*"12".* became .*"13"'),
        ([{**USER, "content": "Hi"}, SAID, NEXT], "changed message 1 of its history"),
        ([USER], "left out the last 1 of 2 messages"),
        ([USER, NEXT], "changed message 2 of its history"),
        ([USER, SAID], "appended no message"),
        ([USER, SAID, NEXT, SAID], "appended a message of role assistant, which the policy did not say"),
        ([USER, SAID, {"role": "tool", "tool_call_id": "call_9", "content": "x"}], "call_9.* did not make"),
        ([USER, SAID, {"role": "tool", "tool_call_id": ["call_9"], "content": "x"}], "call_9.* did not make"),
    ],
)
def test_changed_history_ends_the_conversation_and_names_the_change(messages, reason):
    agent = asks({"messages": [USER]}, {"messages": messages})
    with Policy(agent) as policy, pytest.raises(AgentError, match=reason):
        policy.say("12")


def test_agent_receives_the_reason_for_a_refused_tool_answer():
    heard = queue.SimpleQueue()
    talk = asks(
        {"messages": [USER]}, {"messages": [USER, SAID, {"role": "tool", "tool_call_id": "call_9", "content": "x"}]}
    )

    async def agent(task, **address):
        try:
            await talk(task, **address)
        except openai.BadRequestError as error:
            heard.put(error.message)

    policy = Policy(agent)
    policy.__enter__()
    with pytest.raises(AgentError, match="did not make"):
        policy.say("12")
    assert "did not make" in heard.get(timeout=30)
    policy.environment.close("env_error")


def test_equivalent_forms_of_the_same_history_are_accepted():
    def again(message):
        [call] = message["tool_calls"]
        call["function"]["arguments"] = '{"b":4,"a":3}'
        parts = [{"type": "text", "text": "12"}]
        tool = {"role": "tool", "tool_call_id": call["id"], "content": parts, "name": "multiply"}
        return {"messages": [USER, {**message, "content": "Well. ", "refusal": None}, tool], "tools": [TOOL]}

    with Policy(asks({"messages": [USER], "tools": [TOOL]}, again)) as policy:
        assert policy.say(f"Well. {CALL}").messages == [{"role": "tool", "name": "multiply", "content": "12"}]


def test_changed_tools_end_the_conversation():
    later = {"messages": [USER, SAID, NEXT], "tools": [TOOL]}
    with Policy(asks({"messages": [USER]}, later)) as policy, pytest.raises(AgentError, match="changed its tools"):
        policy.say("12")


@pytest.mark.parametrize("given", [0.5, {"reward": 0.5, "columns": {"tests": 3}}])
def test_coroutine_agent_returns_its_reward(given):
    async def agent(task, **address):
        await asks({"messages": [USER]})(task, **address)
        return given

    with Policy(agent) as policy:
        turn = policy.say("12")
    assert (turn.done, turn.reward) == (True, 0.5)
    assert turn.columns == ({"tests": 3} if isinstance(given, dict) else {})
    assert policy.final is None


def test_posted_reward_counts_after_the_conversation_has_ended():
    async def agent(task, *, base_url, api_key):
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}) as web:
            posted = await web.post(f"{base_url}/reward", json={"reward": 0.25})
            assert posted.status_code == 200
        await asks({"messages": [USER]}, {"messages": [USER, SAID, NEXT]})(task, base_url=base_url, api_key=api_key)

    with Policy(agent) as policy:
        assert policy.say("12").messages == [NEXT]
    assert policy.final == 0.25


def test_agent_logs_belong_to_the_previous_turn():
    tool = {"role": "tool", "tool_call_id": "call_1_0", "content": "12"}

    def answered(message, **more):
        return {"messages": [USER, message, tool], "tools": [TOOL], **more}

    def logged(message):
        return answered(message, extra_body={"columns": {"tool_errors": 2, "seen": "x"}})

    first = {"messages": [USER], "tools": [TOOL], "extra_body": {"columns": {"seen": "nothing"}}}
    for answer, columns in (
        (answered, {"tool_calls": 1, "tool_errors": 0}),
        (logged, {"tool_calls": 1, "tool_errors": 2, "seen": "x"}),
    ):
        with Policy(asks(first, answer)) as policy:
            assert policy.say(CALL).columns == columns
            assert policy.say("It is 12.").columns == {"tool_calls": 0, "tool_errors": 0}


@pytest.mark.parametrize("text", ["<tool_call>{broken</tool_call>", CALL.replace("multiply", "divide")])
def test_unrunnable_tool_call_is_counted(text):
    with Policy(asks({"messages": [USER], "tools": [TOOL]})) as policy:
        assert policy.say(text).columns == {"tool_calls": 1, "tool_errors": 1}


def test_invalid_logged_columns_are_refused():
    with pytest.raises(AgentError, match="the columns .3.; expected a dict"):
        Policy(asks({"messages": [USER], "extra_body": {"columns": 3}})).__enter__()


def test_invalid_outcome_ends_the_conversation():
    async def agent(task, **address):
        await asks({"messages": [USER]})(task, **address)
        return "very good"

    with Policy(agent) as policy, pytest.raises(AgentError, match="the agent's outcome is 'very good'"):
        policy.say("12")


def test_models_endpoint_lists_the_policy():
    session = gateway().open_session()
    listed = openai.OpenAI(base_url=session.base_url, api_key=session.key).models.list()
    assert [model.id for model in listed] == ["policy"]
    session.close("done")
    with pytest.raises(openai.AuthenticationError, match="names no open conversation"):
        openai.OpenAI(base_url=session.base_url, api_key=session.key).models.list()


def test_request_with_a_wrong_key_is_rejected():
    seen = queue.SimpleQueue()

    async def agent(task, *, base_url, api_key):
        for path in ("chat/completions", "reward"):
            async with httpx.AsyncClient(headers={"Authorization": "Bearer wrong"}) as web:
                seen.put((await web.post(f"{base_url}/{path}", json={"messages": [USER], "reward": 9})).status_code)
        await asks({"messages": [USER]})(task, base_url=base_url, api_key=api_key)

    with Policy(agent) as policy:
        assert policy.say("12").reward is None
    assert [seen.get(timeout=30), seen.get(timeout=30)] == [401, 401]


def test_concurrent_requests_are_refused_with_409():
    seen = queue.SimpleQueue()

    async def one(base_url, api_key):
        try:
            await client(base_url, api_key).chat.completions.create(model="x", messages=[USER])
        except openai.APIStatusError as error:
            seen.put(error.status_code)

    async def agent(task, **address):
        await asyncio.gather(one(**address), one(**address))

    policy, refused = Policy(agent), []

    def play() -> None:
        policy.__enter__()
        refused.append(seen.get(timeout=30))  # while the policy has not answered the other one
        policy.say("12")

    with pytest.raises(AgentError, match="sent two requests at once"):
        play()
    # If the second came before the first was read, the failure ends the reset, which refuses the first too.
    assert 409 in (refused or [seen.get(timeout=30), seen.get(timeout=30)])
    policy.environment.close("env_error")


def test_the_gateway_listens_on_the_loopback_address_only():
    port = int(gateway().base_url.split(":")[2].removesuffix("/v1"))
    with open("/proc/net/tcp") as file:
        listening = [line.split()[1] for line in file if line.split()[3] == "0A"]
    assert [one for one in listening if int(one.split(":")[1], 16) == port] == [f"0100007F:{port:04X}"]


def test_all_agents_of_a_process_share_one_gateway():
    found = queue.SimpleQueue()
    threads = [threading.Thread(target=lambda: found.put(gateway())) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert len({id(found.get(timeout=30)) for _ in threads}) == 1
    assert json.loads(httpx.get(f"{gateway().base_url}/models").text)["error"]


def half_open(first: bytes) -> socket.socket:
    """A connection that has sent the beginning of a request."""
    host, port = gateway().base_url.removeprefix("http://").removesuffix("/v1").split(":")
    made = socket.create_connection((host, int(port)), timeout=10)
    made.sendall(first)
    return made


def is_closed(connection: socket.socket, *, within: float) -> bool:
    connection.settimeout(within)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize(
    "first", [b"", b"GET /v1/models HTTP/1.1\r\nHost: x\r\n", b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"]
)
def test_unauthenticated_connections_are_closed_at_the_timeout(monkeypatch, first):
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.3)
    assert is_closed(half_open(first), within=30)


def test_authenticated_connection_outlives_the_timeout_and_the_cap(monkeypatch):
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(connections, "MOST_WAITING", 3)
    session = gateway().open_session()
    agent = half_open(f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\n\r\n".encode())
    assert b"200 OK" in agent.recv(4096)
    others = [half_open(b"") for _ in range(6)]
    assert is_closed(others[0], within=30)
    assert not is_closed(agent, within=0.6)
    session.close("done")


def test_half_open_connections_over_the_cap_evict_the_oldest(monkeypatch):
    monkeypatch.setattr(connections, "MOST_WAITING", 3)
    others = [half_open(b"GET /") for _ in range(6)]
    assert [is_closed(one, within=30) for one in others[:3]] == [True] * 3
    assert [is_closed(one, within=0.2) for one in others[3:]] == [False] * 3
    for one in others:
        one.close()
