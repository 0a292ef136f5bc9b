"""Agents that use `/v1/responses` have the conversations of chat completions."""

import logging
import queue

import openai
import pytest

from tests.unit_tests.environments.agents.test_gateway import CALL, TOOL, USER, Policy, client, is_refused
from torchtitan_rl.environments.agents.responses import as_chat
from torchtitan_rl.environments.agents.settings import log_once

FUNCTION = {"type": "function", "name": "multiply", "parameters": TOOL["function"]["parameters"], "strict": False}


def multiply_agent(seen, *, stream: bool = False):
    """Asks, answers each call with 12, and asks again, with the items of the answers as they came."""

    async def agent(task, *, base_url, api_key):
        items, responses = [USER], client(base_url, api_key).responses
        for _ in range(2):
            asked = {"model": "x", "instructions": "Be short.", "input": items, "tools": [FUNCTION], "store": False}
            answer = await responses.create(**asked, stream=stream)
            if stream:
                events = [event async for event in answer]
                seen.put([event.type for event in events])
                answer = events[-1].response
            seen.put(answer)
            items = [*items, *(item.model_dump(exclude_none=True) for item in answer.output)]
            for item in answer.output:
                if item.type == "function_call":
                    items.append({"type": "function_call_output", "call_id": item.call_id, "output": "12"})

    return agent


def test_items_of_the_responses_api_are_one_conversation():
    seen = queue.SimpleQueue()
    with Policy(multiply_agent(seen)) as policy:
        assert policy.opening == [{"role": "system", "content": "Be short."}, USER]
        assert policy.opening.tools == [{"type": "function", "function": {
            "name": "multiply", "parameters": TOOL["function"]["parameters"]
        }}]  # fmt: skip
        turn = policy.say(f"I multiply. {CALL}{CALL}")
        assert turn.trace == 0
        assert turn.messages == [{"role": "tool", "name": "multiply", "content": "12"}] * 2
        assert policy.say("It is 12.").done
    first, last = seen.get(timeout=30), seen.get(timeout=30)
    assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
    assert (first.output[1].name, first.output[1].arguments) == ("multiply", '{"a": 3, "b": 4}')
    assert last.output_text == "It is 12."
    assert (first.usage.input_tokens, first.usage.output_tokens) == (3, 2)


def test_streamed_response_ends_with_the_plain_response():
    seen = queue.SimpleQueue()
    with Policy(multiply_agent(seen, stream=True)) as policy:
        assert policy.say(CALL).trace == 0
        assert policy.say("It is 12.").done
    types, called, later, said = (seen.get(timeout=30) for _ in range(4))
    assert types[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert "response.function_call_arguments.done" in types
    assert [item.type for item in called.output] == ["function_call"]
    assert "response.output_text.delta" in later
    assert (later[-1], said.output_text) == ("response.completed", "It is 12.")


def test_tools_that_are_no_functions_are_left_out_and_named_once_in_the_log(caplog):
    others = [{"type": "web_search"}, {"type": "namespace", "name": "mcp", "tools": [FUNCTION]}]

    async def agent(task, *, base_url, api_key):
        for question in "ab":
            await client(base_url, api_key).responses.create(model="x", input=question, tools=[*others, FUNCTION])

    log_once.cache_clear()
    with caplog.at_level(logging.WARNING), Policy(agent) as policy:
        assert [tool["function"]["name"] for tool in policy.opening.tools] == ["multiply"]
        assert not policy.say("12").done
    assert [record.getMessage() for record in caplog.records if "left out" in record.getMessage()] == [
        "agents' tools of type namespace, web_search are left out: only functions are followed"
    ]


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
CALLED = {"type": "function_call", "call_id": "c", "name": "multiply", "arguments": "{}"}


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id .*: send the whole history in input"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "response_format .*: describe"),
        ({"input": [{"type": "image_generation_call", "id": "x"}]}, "an item of type image_generation_call"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input_image.*; expected text"),
        ({"input": [USER, CALLED, {"type": "function_call_output", "call_id": "c", "output": [IMAGE]}]}, "; expected"),
        (
            {"input": [USER, {"type": "reasoning", "id": "x", "summary": [], "encrypted_content": "gAAA"}]},
            "a reasoning item with encrypted_content alone.*; expected its text",
        ),
    ],
)
def test_what_the_responses_api_has_more_is_refused_by_name(setting, reason):
    async def agent(task, *, base_url, api_key):
        with pytest.raises(openai.BadRequestError, match=reason):
            await client(base_url, api_key).responses.create(**{"model": "x", "input": "hi", **setting})

    is_refused(agent, reason)


@pytest.mark.parametrize("place", ["content", "summary"])
def test_reasoning_items_are_the_thinking_of_their_turn(place):
    thought = {"type": "reasoning", "id": "x", "summary": []}
    thought[place] = [{"type": "reasoning_text", "text": "I multiply."}]
    items = [{"role": "user", "content": "3 * 4?"}, thought, {"role": "assistant", "content": "12"}, USER]
    messages = as_chat({"input": items})["messages"]
    said = {"role": "assistant", "content": "12", "tool_calls": [], "reasoning_content": "I multiply."}
    assert messages[1:] == [said, USER]
