"""Requests that no client should send, each in a conversation of its own: none hurts another or goes without an answer."""

import dataclasses
import json
import random
import socket
import time
from collections import Counter

import httpx
import pytest

from tests.parts.conversations import ScriptedEngine, conversation, conversations, prompts
from torchtitan_rl.environments.agents import AgentEnvironment
from torchtitan_rl.environments.agents.gateway import gateway
from torchtitan_rl.generator.grammars import Grammars
from torchtitan_rl.generator.rollout import roll_out

NUM = 60
"""200 of them ended the same way, in 25 s on a busy machine."""

USER = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}
FORM = {"type": "json_schema", "name": "n", "schema": SCHEMA}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "ok"}]}
THOUGHT = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "t"}]}
CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
REQUESTS = {
    "/chat/completions": {
        "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                     {"role": "tool", "tool_call_id": "c", "content": "ok"}, USER],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}], "tool_choice": "auto",
        "stream_options": {"include_usage": True}, "response_format": FORM, "structured_outputs": None, "columns": {"x": 1},
    },
    "/responses": {
        "input": [USER, THOUGHT, CALLED, {"type": "function_call_output", "call_id": "c", "output": "ok"}, USER],
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}], "text": {"format": FORM}, "stream": True,
    },
    "/messages": {
        "system": [{"type": "text", "text": "s"}],
        "messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                     {"role": "user", "content": [RESULT, {"type": "text", "text": "Go"}]}],
        "tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"}, "output_config": {"format": FORM},
    },
}  # fmt: skip
VALUES = [
    None, True, -1, 5, 1e308, 10**400, "", "x", "\ud800", "\0", "<|endoftext|>", "{{ 7 * 7 }}", "\u00e9" * 5000, "DEEP",
    float("nan"), float("inf"), [], {}, [None], [[]], {"": ""}, {"type": "x"}, [1, "a"], "required", {"type": "any"},
    {"$ref": "#"}, {"type": "object"}, {"text": 5}, {"type": "function", "function": {"name": "f"}}, {"json": "{"},
]  # fmt: skip
KEYWORDS = [
    "not", "if", "contains", "uniqueItems", "propertyNames", "patternProperties", "$ref", "$dynamicRef", "enum",
    "const", "format", "pattern", "minLength", "maxLength", "minimum", "multipleOf", "minItems", "maxItems",
    "allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalProperties", "minProperties", "type",
    "required", "properties", "$defs", "$id", "$schema", "x-guidance",
]  # fmt: skip
TEXTS = [
    "", "null", "[]", "NaN", "{", "\0", "[" * 100_000, '{"a":' * 50_000, "1" * 6000, "\ufeff{}", '{"messages":5,"messages":[]}',
]  # fmt: skip


def places(value, way=()):
    """All places within a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*way, key)
        yield from places(part, (*way, key))


def hostile(draw: random.Random) -> tuple[str, bytes]:
    """A request with one to three wrong places, or none at all."""
    if draw.random() < 0.06:
        return "/chat/completions", draw.choice(TEXTS).encode()
    path, request = draw.choice(list(REQUESTS.items()))
    request = json.loads(json.dumps(request))
    for _ in range(draw.choice([1, 1, 2, 3])):
        *way, last = draw.choice(list(places(request)))
        container = request
        for key in way:
            container = container[key]
        if draw.random() < 0.3 and {"type", "properties"} & set(way):
            last = draw.choice(KEYWORDS)
        if isinstance(container, dict) and draw.random() < 0.15:
            container.pop(last, None)
        elif isinstance(container, dict) or isinstance(last, int):
            container[last] = draw.choice(VALUES)
    return path, json.dumps(request).replace('"DEEP"', "[" * 900 + "]" * 900).encode()


def test_each_hostile_request_is_followed_or_refused_by_name_and_hurts_nobody(made):
    draw = random.Random(0)
    requests, statuses, clients = [hostile(draw) for _ in range(NUM)], Counter(), []

    async def agent(number, *, base_url, api_key):
        if not clients:
            clients.append(httpx.AsyncClient(timeout=60))  # all agents share a loop
        headers, (path, body) = {"Authorization": f"Bearer {api_key}"}, requests[number]
        answer = await clients[0].post(base_url + path, content=body, headers=headers)
        statuses[answer.status_code] += 1
        assert answer.status_code == 200 or answer.json()["error"]["message"]
        after = await clients[0].post(f"{base_url}/chat/completions", json={"messages": [USER]}, headers=headers)
        return float(after.status_code == 200)

    [prompt] = prompts(made, 1)
    played = [conversation(dataclasses.replace(prompt, prompt_idx=number)) for number in range(NUM)]
    factory = conversations(
        lambda prompt: AgentEnvironment(agent, task=prompt.prompt_idx, role="tool"), made,
        on_failure="none", max_turns=9, max_answer_characters=100_000,
    )  # fmt: skip
    grammars = Grammars(made, "auto", [made.eos_token_id], len(made))
    pool = factory.start(played, make_grammar=grammars.of)
    try:
        list(roll_out(played, ScriptedEngine(made, "x"), pool, lambda value: value, wait_for_answers=False))
    finally:
        pool.close()
    assert set(statuses) == {200, 400}, statuses
    ended = [one for one in played if one.finish_reason != "stop"]
    # What only the whole conversation and its chat template can tell ends the conversation, by name.
    assert all("which the policy did not make" in one.error or "has no attribute" in one.error for one in ended)
    assert len(ended) < NUM / 10
    assert all(one.turns[-1].reward == 1 for one in played if one.finish_reason == "stop")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}", b"401"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: \xff\xfe\r\nContent-Length: 0\r\n\r\n", b"401"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", b"400"),
        (b"GET /v1/chat/completions HTTP/1.1\r\nHost: x\r\n\r\n", b"405"),
        (b"POST /v1/../../etc/passwd HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", b"404"),
        (b"POST /v1/reward HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000 + b"\r\n\r\n", b"401"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
    ],
)
def test_what_is_no_request_of_an_open_conversation_gets_its_status(sent, status):
    port = int(gateway().base_url.split(":")[2].removesuffix("/v1"))
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        line.sendall(sent)
        assert line.recv(4096).split()[1] == status


def test_a_client_that_sends_a_byte_a_second_or_goes_away_keeps_nobody_waiting():
    session = gateway().open_session()
    port = int(session.base_url.split(":")[2].removesuffix("/v1"))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\nContent-Length: 99\r\n\r\n{{"
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    for number, line in enumerate(slow):
        line.sendall(head.encode())
        if number % 2:
            line.close()
    models = httpx.get(f"{session.base_url}/models", headers={"api-key": session.key}, timeout=5)
    assert models.status_code == 200
    session.close("done")
    for line in slow:
        line.close()


def test_a_request_that_is_whole_only_after_the_end_is_refused():
    session = gateway().open_session()
    port = int(session.base_url.split(":")[2].removesuffix("/v1"))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAPI-Key: {session.key}\r\nContent-Length: 2\r\n\r\n{{"
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        line.sendall(head.encode())
        time.sleep(0.5)  # the gateway has found its conversation
        session.close("done")
        line.sendall(b"}")
        assert line.recv(4096).split()[1] == b"401"
