"""Agents that speak HTTP to a policy whose turns the test says itself: requests, streams, refusals, rewards, history."""

import asyncio
import json
import operator
import queue
import re
import threading
import time
from contextlib import closing

import httpx
import openai
import pytest

from torchtitan_rl.conversation import Conversation, Sampled
from torchtitan_rl.data.tool_calls import parse_calls
from torchtitan_rl.environments import Context
from torchtitan_rl.environments.agents import AgentEnvironment
from torchtitan_rl.environments.agents import gateway as gateways
from torchtitan_rl.environments.agents.gateway import gateway
from torchtitan_rl.environments.agents.protocol import AgentError, ChatRequest
from torchtitan_rl.rewards.workers import WorkerPool
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.types import Prompt

USER = {"role": "user", "content": "What is 3 * 4?"}
TOOL = {"type": "function", "function": {"name": "multiply", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 3, "b": 4}}</tool_call>'


class Policy:
    """The policy's side of one agent's conversation."""

    def __init__(self, agent, in_order=False, workers=None, **settings) -> None:
        self.conversation = Conversation(
            prompt=Prompt(prompt_idx=0, text="?", token_ids=[1, 2, 3], expected_answer="", messages=[USER]),
            sample_idx=0, sampling=SamplingConfig(max_tokens=100), most_in_turn=50, most_tokens=1000,
        )  # fmt: skip
        self.environment = AgentEnvironment(agent, **settings)
        self.environment.fit(
            conversation=self.conversation, call_seconds=20, most_characters=1000, parser=parse_calls,
            begins_thinking=False, in_order=in_order, workers=workers,
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
        chat = client(base_url, api_key).chat.completions
        for request in requests:
            given = request if isinstance(request, dict) else request(message)
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


def test_streamed_response_equals_the_plain_response():
    seen = queue.SimpleQueue()

    async def agent(task, *, base_url, api_key):
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chat = client(base_url, api_key).chat.completions
        async for chunk in await chat.create(model="x", messages=[USER], tools=[TOOL], **options):
            seen.put(chunk)

    with Policy(agent) as policy:
        assert policy.say(f"Well. {CALL}{CALL}").done
    text, *calls, end, usage = [seen.get(timeout=30) for _ in range(5)]
    assert (text.choices[0].delta.content, text.choices[0].delta.tool_calls) == ("Well.", None)
    for number, chunk in enumerate(calls):
        [call] = chunk.choices[0].delta.tool_calls
        assert (call.index, call.function.name, chunk.choices[0].delta.content) == (number, "multiply", None)
    assert end.choices[0].finish_reason == "tool_calls"
    assert usage.usage.total_tokens == 5


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
EMPTY_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
ASKED = {"role": "assistant", "tool_calls": [EMPTY_CALL]}
UNUSUAL = {
    "custom tool": ({"messages": [USER], "tools": [{"type": "custom", "custom": {"name": "x"}}]}, "custom.*; expected functions"),
    "tool without a name": ({"messages": [USER], "tools": [{"type": "function", "function": {"name": 5}}]}, "expected functions"),
    "image": ({"messages": [{"role": "user", "content": [IMAGE]}]}, "image_url.*; expected text"),
    "image of a tool": ({"messages": [USER, ASKED, {"role": "tool", "tool_call_id": "c", "content": [IMAGE]}]}, "expected text"),
    "image of the policy": ({"messages": [USER, {"role": "assistant", "content": [IMAGE]}]}, "expected text"),
    "role function": ({"messages": [USER, {"role": "function", "name": "f", "content": "1"}]}, "the role 'function'; expected"),
    "no messages": ({"messages": []}, "cannot be read: .*no messages"),
    "words": ({"messages": "Hi"}, "cannot be read"),
    "a list": ([USER], "cannot be read"),
    "half a character": ({"messages": [{"role": "user", "content": "\ud800"}]}, "cannot be read: .*surrogates not allowed"),
    "no number": ({"messages": [USER], "columns": {"a": float("nan")}}, "cannot be read: .*not JSON compliant"),
    "thread": ({"messages": [USER], "thread": {"type": "enabled"}}, "asked for thread .*: send the whole conversation"),
    "guided_json": ({"messages": [USER], "guided_json": {"type": "object"}}, "asked for guided_json"),
    "structured_outputs": ({"messages": [USER], "structured_outputs": {"choice": ["a"]}}, "asked for structured_outputs"),
}  # fmt: skip


def test_what_cannot_be_followed_is_refused_by_name_and_the_agent_goes_on():
    async def agent(task, *, base_url, api_key):
        async with httpx.AsyncClient(headers={"Authorization": f"bearer {api_key}"}, timeout=30) as web:
            for name, (body, reason) in UNUSUAL.items():
                answer = await web.post(f"{base_url}/chat/completions", content=json.dumps(body))
                error = answer.json()["error"]
                assert answer.status_code == 400, name
                assert re.search(reason, error["message"]), (name, error["message"])
                assert ("details" in error) == (name == "thread")
        await asks({"messages": [USER]})(task, base_url=base_url, api_key=api_key)
        return 1.0

    with Policy(agent) as policy:
        assert policy.say("12").reward == 1.0


@pytest.mark.parametrize("header", ["Authorization: bearer ", "Authorization: Bearer  ", "api-key: ", "x-api-key: "])
def test_a_key_is_known_in_each_header_that_clients_send(header):
    session, (name, value) = gateway().open_session(), header.split(": ", 1)
    models = httpx.get(f"{session.base_url}/models", headers={name: f"{value}{session.key}"})
    session.close("done")
    assert models.json()["data"][0]["id"] == "policy"


def is_refused(agent, reason: str) -> None:
    """The run is told why the only request of an agent was refused."""
    policy = Policy(agent)
    with pytest.raises(AgentError, match=f"ended without a request; its last request was refused: .*{reason}"):
        policy.__enter__()
    policy.environment.close("env_error")


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"n": 2}, "asked for n 2, which is not supported: send several requests"),
        ({"logprobs": True}, "asked for logprobs True"),
        ({"tool_choice": "required", "tools": [TOOL]}, "asked for tool_choice 'required'.* leave it to the policy"),
        ({"response_format": {"type": "json_object"}}, "asked for response_format .*: describe the format in the prompt"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_followed_are_refused_by_name_with_the_remedy(setting, reason):
    async def agent(task, *, base_url, api_key):
        with pytest.raises(openai.BadRequestError, match=reason):
            await client(base_url, api_key).chat.completions.create(**{"model": "x", "messages": [USER], **setting})

    is_refused(agent, reason)


def test_other_settings_of_sampling_are_not_followed():
    with Policy(asks({"messages": [USER], "temperature": 0.2, "top_p": 0.5})) as policy:
        assert policy.say("12").finish_reason == "stop"


SAID = {"role": "assistant", "content": "12"}
NEXT = {"role": "user", "content": "And 5 * 6?"}


@pytest.mark.parametrize(
    ("messages", "reason", "tools"),
    [
        ([USER, {**SAID, "content": "13"}, NEXT], 'changed message 2: .*"12".* became .*"13"', []),
        ([{**USER, "content": "Hi"}, SAID, NEXT], "began with other messages", []),
        ([USER], "left out the last 1 of 2 messages", []),
        ([USER, NEXT], "changed message 2", []),
        ([USER, SAID], "appended no message", []),
        ([USER, SAID, NEXT, SAID], "appended a message of role assistant, which the policy did not say", []),
        ([USER, SAID, NEXT], "has other tools", [TOOL]),
    ],
)
def test_changed_history_or_tools_open_a_trace_that_names_the_change(messages, reason, tools):
    agent = asks({"messages": [USER]}, {"messages": messages, "tools": tools})
    with Policy(agent) as policy:
        turn = policy.say("12")
        context = turn.messages
        assert isinstance(context, Context)
        assert [(m["role"], m["content"]) for m in context] == [(m["role"], m["content"]) for m in messages]
        assert (context.parent, context.tools) == (0, tools)
        assert re.match(reason, context.reason)
        assert policy.say("30").done


@pytest.mark.parametrize("call_id", ["call_9", ["call_9"]])
def test_answer_to_a_call_that_was_not_made_ends_the_conversation(call_id):
    answer = {"role": "tool", "tool_call_id": call_id, "content": "x"}
    agent = asks({"messages": [USER]}, {"messages": [USER, SAID, answer]})
    with Policy(agent) as policy, pytest.raises(AgentError, match="call_9.* did not make"):
        policy.say("12")


def test_requests_continue_the_trace_that_they_extend():
    other = {"role": "user", "content": "A question of its own."}
    said = {"role": "assistant", "content": "yes"}
    agent = asks(
        {"messages": [USER]}, {"messages": [other]}, {"messages": [USER, SAID, NEXT]}, {"messages": [other, said, NEXT]}
    )
    with Policy(agent) as policy:
        assert policy.say("12").messages.reason == "began with other messages"
        turn = policy.say("yes")
        assert (turn.trace, turn.messages) == (0, [NEXT])
        turn = policy.say("30")
        assert (turn.trace, turn.messages) == (1, [NEXT])
        assert policy.say("no").done


def test_policy_text_in_a_new_context_is_as_it_was_sampled():
    def shortened(message):
        tool = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "12"}
        return {"messages": [NEXT, message, tool], "tools": [TOOL]}

    with Policy(asks({"messages": [USER], "tools": [TOOL]}, shortened)) as policy:
        context = policy.say(f"<think>hm</think>I multiply. {CALL}").messages
    assert context == [
        NEXT, {"role": "assistant", "content": f"I multiply. {CALL}"},
        {"role": "tool", "name": "multiply", "content": "12"},
    ]  # fmt: skip


@pytest.mark.parametrize("arguments", ['{"INVALID_JSON": "x"}', "{}", "some text", None])
def test_a_broken_call_is_not_compared_by_its_arguments(arguments):
    def kept(message):
        [call] = message["tool_calls"]
        call["function"]["arguments"] = arguments
        tool = {"role": "tool", "tool_call_id": call["id"], "content": "error"}
        return {"messages": [USER, message, tool], "tools": [TOOL]}

    with Policy(asks({"messages": [USER], "tools": [TOOL]}, kept)) as policy:
        turn = policy.say("<tool_call>{broken</tool_call>")
        assert (turn.trace, turn.columns["tool_errors"]) == (0, 1)


@pytest.mark.parametrize(
    ("text", "reward"), [("<tool_call>{broken</tool_call>", 0.0), (CALL.replace("multiply", "divide"), 0.0), ("", 0.0)]
)
def test_an_agent_that_fails_after_a_broken_turn_ends_with_a_name_and_a_reward(text, reward):
    async def agent(task, **address):
        await asks({"messages": [USER], "tools": [TOOL]})(task, **address)
        raise RuntimeError("the model misbehaved")

    with Policy(agent) as policy:
        turn = policy.say(text)
        assert (turn.done, turn.finish_reason, turn.reward) == (True, "broken_call", reward)
        assert turn.columns["tool_errors"] == 1
    assert policy.final is None
    with Policy(agent) as policy, pytest.raises(AgentError, match="the model misbehaved"):
        policy.say(CALL)


def test_a_tools_pattern_that_takes_for_ever_is_not_waited_for():
    schema = {"type": "object", "properties": {"name": {"type": "string", "pattern": "^(a+)+$"}}}
    tool = {"type": "function", "function": {"name": "greet", "parameters": schema}}
    asked, began = {"messages": [USER], "tools": [tool]}, time.monotonic()
    with closing(WorkerPool([operator.call], 1)) as workers:
        for name, wrong in (("a" * 32 + "b", 0), ("b", 1), ("a", 0)):
            with Policy(asks(asked), workers=workers) as policy:
                call = json.dumps({"name": "greet", "arguments": {"name": name}})
                assert policy.say(f"<tool_call>{call}</tool_call>").columns["tool_errors"] == wrong
    assert time.monotonic() - began < 30


def test_an_answered_title_does_not_hide_the_broken_turn_for_which_an_agent_fails():
    title, call = {"messages": [{"role": "user", "content": "Give a title."}]}, {"messages": [USER], "tools": [TOOL]}

    def failing(*requests):
        async def agent(task, **address):
            await asks(*requests)(task, **address)
            raise RuntimeError("the model misbehaved")

        return agent

    with Policy(failing(call, title)) as policy:
        assert policy.say("<tool_call>{broken</tool_call>").columns["tool_errors"] == 1
        turn = policy.say("A product")
        assert (turn.finish_reason, turn.reward, turn.columns) == ("broken_call", 0.0, {"tool_errors": 0})
    rewritten = {"messages": [USER, {"role": "user", "content": "That was no call."}], "tools": [TOOL]}
    with Policy(failing(call, rewritten)) as policy:
        policy.say("<tool_call>{broken</tool_call>")
        with pytest.raises(AgentError, match="the model misbehaved"):
            policy.say("12")


def test_equivalent_forms_of_the_same_history_are_accepted():
    def again(message):
        [call] = message["tool_calls"]
        call["function"]["arguments"] = '{"b":4,"a":3}'
        parts = [{"type": "text", "text": "12"}]
        tool = {"role": "tool", "tool_call_id": call["id"], "content": parts, "name": "multiply"}
        return {"messages": [USER, {**message, "content": "Well. ", "refusal": None}, tool], "tools": [TOOL]}

    with Policy(asks({"messages": [USER], "tools": [TOOL]}, again)) as policy:
        assert policy.say(f"Well. {CALL}").messages == [{"role": "tool", "name": "multiply", "content": "12"}]


DEEP = '{"a":' * 600 + "1" + "}" * 600


@pytest.mark.parametrize(
    ("said", "repeated", "trace"),
    [
        ('{"a": 12345678901234567890}', '{"a": 12345678901234567000}', 0),  # as JavaScript writes it
        ('{"a": -0.0, "b": 1}', '{"b": 1.0, "a": 0}', 0),
        ('{"a": NaN}', '{"a": NaN}', 0),
        pytest.param(DEEP, DEEP, 0, id="deep"),
        ('{"a": 1}', '{"a": true}', None),
        ('{"a": 1}', '{"a": "1"}', None),
        ('{"a": [1]}', '{"a": [1, 1]}', None),
    ],
)
def test_arguments_that_are_equal_for_some_client_continue_their_trace(said, repeated, trace):
    def again(message):
        [call] = message["tool_calls"]
        call["function"]["arguments"] = repeated
        tool = {"role": "tool", "tool_call_id": call["id"], "content": "12"}
        return {"messages": [USER, message, tool], "tools": [TOOL]}

    with Policy(asks({"messages": [USER], "tools": [TOOL]}, again)) as policy:
        turn = policy.say(f'<tool_call>{{"name": "multiply", "arguments": {said}}}</tool_call>')
        assert turn.trace == trace


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
    plain = {"tool_calls": 1, "tool_errors": 0}
    for answer, columns in ((answered, plain), (logged, {**plain, "tool_errors": 2, "seen": "x"})):
        with Policy(asks(first, answer)) as policy:
            assert policy.say(CALL).columns == columns
            assert policy.say("It is 12.").columns == {"tool_calls": 0, "tool_errors": 0}


def question(number: int) -> dict:
    return {"messages": [{"role": "user", "content": f"question {number}"}]}


def test_concurrent_requests_are_answered_one_after_another_in_their_order():
    seen = queue.SimpleQueue()

    async def one(number, base_url, api_key):
        response = await client(base_url, api_key).chat.completions.create(model="x", **question(number))
        seen.put((number, response.choices[0].message.content))

    async def agent(task, **address):
        await asks(question(0))(task, **address)
        await asyncio.gather(*(one(number, **address) for number in (2, 1, 3)))

    with Policy(agent, in_order=True) as policy:
        contexts = [policy.say(text).messages for text in ("start", "one", "two")]
        assert [context[0]["content"] for context in contexts] == ["question 1", "question 2", "question 3"]
        assert policy.say("three").done
    assert {seen.get(timeout=30) for _ in range(3)} == {(1, "one"), (2, "two"), (3, "three")}


def test_all_requests_are_answered_when_a_conversation_ends_right_after_an_answer():
    session, statuses = gateway().open_session(), queue.SimpleQueue()

    def ask(number):
        url, headers = f"{session.base_url}/chat/completions", {"api-key": session.key}
        statuses.put(httpx.post(url, json=question(number), headers=headers, timeout=10).status_code)

    for number in range(3):
        threading.Thread(target=ask, args=(number,)).start()
    first, *_ = [session.next_event(10) for _ in range(3)]
    session.reply(first, "{}", media_type="application/json")
    session.close("done")
    assert sorted(statuses.get(timeout=20) for _ in range(3)) == [200, 400, 400]


def test_a_request_that_is_sent_again_joins_the_first():
    asks_again = threading.Event()

    async def agent(task, *, base_url, api_key):
        body = {"model": "x", "messages": [USER]}
        headers = {"Authorization": f"Bearer {api_key}"}
        async with httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(30, read=0.3)) as hasty:
            for _ in range(2):
                with pytest.raises(httpx.ReadTimeout):
                    await hasty.post(f"{base_url}/chat/completions", json=body)
        asks_again.set()
        async with httpx.AsyncClient(headers=headers, timeout=30) as web:
            answer = await web.post(f"{base_url}/chat/completions", json=body)
        return {"reward": 1.0, "columns": {"said": answer.json()["choices"][0]["message"]["content"]}}

    with Policy(agent) as policy:
        assert asks_again.wait(30)
        turn = policy.say("12")
    assert (turn.done, turn.columns) == (True, {"said": "12"})


@pytest.mark.parametrize("stream", [False, True])
def test_a_late_answer_sends_something_before_it_is_there(monkeypatch, stream):
    monkeypatch.setattr(gateways, "QUIET_SECONDS", 0.2)
    seen = queue.SimpleQueue()

    async def agent(task, *, base_url, api_key):
        chat = client(base_url, api_key).with_options(timeout=0.6).chat.completions
        answer = await chat.create(model="x", messages=[USER], stream=stream)
        if stream:
            seen.put([chunk async for chunk in answer][0].choices[0].delta.content)
        else:
            seen.put(answer.choices[0].message.content)

    with Policy(agent) as policy:
        time.sleep(1.5)
        assert policy.say("12").done
    assert seen.get(timeout=30) == "12"


def test_the_gateway_listens_on_the_loopback_address_only():
    port = int(gateway().base_url.split(":")[2].removesuffix("/v1"))
    with open("/proc/net/tcp") as file:
        listening = [line.split()[1] for line in file if line.split()[3] == "0A"]
    assert [one for one in listening if int(one.split(":")[1], 16) == port] == [f"0100007F:{port:04X}"]


@pytest.mark.parametrize("parameters", [{}, {"parameters": None}])
def test_a_tool_without_parameters_takes_none(parameters):
    tool = {"type": "function", "function": {"name": "stop", **parameters}}
    [read] = ChatRequest.read("", json.dumps({"messages": [USER], "tools": [tool]}).encode(), None).tools
    assert read["function"]["parameters"] == {"type": "object", "properties": {}}
