"""Agents of Anthropic's client, which use `/v1/messages`, have the conversations of chat completions."""

import queue

import anthropic
import pytest

from tests.unit_tests.environments.agents.test_gateway import CALL, NEXT, TOOL, USER, Policy, client, is_refused

MULTIPLY = {"name": "multiply", "input_schema": TOOL["function"]["parameters"]}
SYSTEM = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]


def claude(base_url, api_key) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0)


def multiply_agent(seen, *, stream: bool = False, turns: int = 2, result: str = "12"):
    """Asks, answers each call with `result`, and asks again, with the blocks of the answers as they came."""

    async def agent(task, *, base_url, api_key):
        history, asked = [USER], {"model": "x", "max_tokens": 99, "system": SYSTEM, "tools": [MULTIPLY]}
        for _ in range(turns):
            if stream:
                async with claude(base_url, api_key).messages.stream(messages=history, **asked) as events:
                    answer = await events.get_final_message()
            else:
                answer = await claude(base_url, api_key).messages.create(messages=history, **asked)
            seen.put(answer)
            history = [*history, {"role": "assistant", "content": answer.model_dump(exclude_none=True)["content"]}]
            calls = [block for block in answer.content if block.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": result} for call in calls]
            history.append({"role": "user", "content": results or "And now?"})

    return agent


@pytest.mark.parametrize("stream", [False, True])
def test_blocks_of_the_messages_api_are_one_conversation(stream):
    seen = queue.SimpleQueue()
    with Policy(multiply_agent(seen, stream=stream)) as policy:
        assert policy.opening == [{"role": "system", "content": "Be short."}, USER]
        assert policy.opening.tools == [TOOL]
        turn = policy.say(f"<think>hm</think>I multiply. {CALL}{CALL}")
        assert turn.trace == 0
        assert turn.messages == [{"role": "tool", "name": "multiply", "content": "12"}] * 2
        assert policy.say("It is 12.").done
    first, last = seen.get(timeout=30), seen.get(timeout=30)
    assert [block.type for block in first.content] == ["text", "tool_use", "tool_use"]
    assert (first.content[1].name, first.content[1].input, first.stop_reason) == (
        "multiply", {"a": 3, "b": 4}, "tool_use",
    )  # fmt: skip
    assert (last.content[0].text, last.stop_reason) == ("It is 12.", "end_turn")
    assert (first.usage.input_tokens, first.usage.output_tokens) == (3, 2)


def test_unreadable_call_has_the_reason_as_input_and_continues_its_trace():
    seen = queue.SimpleQueue()
    with Policy(multiply_agent(seen)) as policy:
        turn = policy.say('<tool_call>{"name": "multiply", broken</tool_call>')
        assert turn.trace == 0
        assert policy.say("").done
    assert seen.get(timeout=30).content[0].input["error"].startswith("the call is not valid JSON")


def test_results_come_before_the_text_of_the_same_message_and_thinking_is_left_out():
    calls = [{"type": "thinking", "thinking": "hm", "signature": ""}]
    calls.append({"type": "tool_use", "id": "t", "name": "multiply", "input": {"a": 1}})
    answer = [{"type": "text", "text": "Go on."}]
    answer.insert(0, {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "7"}]})

    async def agent(task, *, base_url, api_key):
        messages = [USER, {"role": "assistant", "content": calls}, {"role": "user", "content": answer}]
        await claude(base_url, api_key).messages.create(model="x", max_tokens=9, messages=messages, tools=[MULTIPLY])

    with Policy(agent) as policy:
        said = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 1}}}
        assert policy.opening == [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [said]},
            {"role": "tool", "name": "multiply", "content": "7"},
            {"role": "user", "content": "Go on."},
        ]
        assert policy.say("8").done


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "the tool .*web_search.*; expected tools"),
        ({"tool_choice": {"type": "any"}, "tools": [MULTIPLY]}, "tool_choice 'required', which is not supported"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "response_format .*: describe"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "a block of type image"),
        ({"messages": [USER, {"role": "assistant", "content": "It is"}]}, "end with a user's message"),
    ],
)
def test_what_the_messages_api_has_more_is_refused_by_name(setting, reason):
    async def agent(task, *, base_url, api_key):
        with pytest.raises(anthropic.BadRequestError, match=reason):
            await claude(base_url, api_key).messages.create(
                **{"model": "x", "max_tokens": 9, "messages": [USER], **setting}
            )

    is_refused(agent, reason)


def test_chat_and_messages_continue_the_same_trace_and_a_wrong_key_is_refused():
    async def agent(task, *, base_url, api_key):
        answer = await claude(base_url, api_key).messages.create(model="x", max_tokens=9, messages=[USER])
        messages = [USER, {"role": "assistant", "content": answer.content[0].text}, NEXT]
        await client(base_url, api_key).chat.completions.create(model="x", messages=messages)
        with pytest.raises(anthropic.AuthenticationError, match="the key names no open conversation"):
            await claude(base_url, "wrong").messages.create(model="x", max_tokens=9, messages=[USER])

    with Policy(agent) as policy:
        turn = policy.say("12")
        assert (turn.trace, turn.messages) == (0, [NEXT])
        assert policy.say("13").done


def test_the_tool_runner_goes_on_without_a_thread():
    @anthropic.beta_async_tool
    async def multiply(a: int, b: int) -> str:
        """Multiply."""
        return str(a * b)

    async def agent(task, *, base_url, api_key):
        asked = {"model": "x", "max_tokens": 99, "messages": [USER], "tools": [multiply]}
        await claude(base_url, api_key).beta.messages.tool_runner(**asked).until_done()

    with Policy(agent) as policy:
        assert policy.say(CALL).messages == [{"role": "tool", "name": "multiply", "content": "12"}]
        assert policy.say("It is 12.").done
