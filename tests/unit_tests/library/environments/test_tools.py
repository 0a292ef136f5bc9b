"""Functions as tools: schemas, the calls in a text, and what each bad call is answered."""

import asyncio
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from torchtitan_rl.core.errors import UserError
from torchtitan_rl.library.environments.tools import ToolCall, ToolEnvironment, parse_calls, tool_schemas
from torchtitan_rl.resilience.printed import SHOWN, bounded_output
from torchtitan_rl.resilience.tool_processes import in_processes


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


async def look_up(word: str) -> dict:
    """
    Looks a word up.

    Args:
        word: The word.
    """
    await asyncio.sleep(0)
    return {"word": word}


def hermes(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


def answers(text: str, *tools, **options) -> list[str]:
    return [message["content"] for message in ToolEnvironment(tools, **options).step(said(text)).messages]


def test_schemas_are_those_that_chat_templates_take():
    [schema] = tool_schemas([multiply])
    assert schema["function"]["name"] == "multiply"
    assert schema["function"]["parameters"]["properties"]["a"] == {
        "type": "integer",
        "description": "The first integer.",
    }


def test_a_function_that_cannot_be_described_is_the_users_mistake():
    def bare(a):
        return a

    with pytest.raises(UserError, match=r"tools = \['bare'\]"):
        tool_schemas([bare])
    with pytest.raises(UserError, match="one tool of each name"):
        tool_schemas([multiply, multiply])


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("The answer is 4.", []),
        (hermes("multiply", a=1, b=2), [ToolCall("multiply", {"a": 1, "b": 2})]),
        ("Let me see. " + hermes("f") + hermes("g", x="y"), [ToolCall("f", {}), ToolCall("g", {"x": "y"})]),
        ('{"name": "f", "parameters": {"x": 1}}', [ToolCall("f", {"x": 1})]),
        (
            '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
            [ToolCall("f", {}), ToolCall("g", {})],
        ),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', [ToolCall("f", {"x": 1})]),
        ('{"answer": 4}', []),
    ],
)
def test_calls_are_read_in_both_formats(text, calls):
    assert parse_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<tool_call>{'name': 'multiply'}</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "multiply", "arguments": {"a": 1', "not valid JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'has no "name"'),
        ('<tool_call>{"name": "multiply", "arguments": [1, 2]}</tool_call>', "not a JSON object"),
        (hermes("divide", a=1), "there is no tool 'divide'; there are ['multiply']"),
        (hermes("multiply", a=1), "missing a required argument: 'b'"),
        (hermes("multiply", a=1, b=2, c=3), "unexpected keyword argument 'c'"),
        (hermes("multiply", a=None, b=2), "TypeError"),
    ],
)
def test_a_bad_call_is_told_to_the_policy_and_counted(text, told):
    turn = ToolEnvironment([multiply]).step(said(text))
    assert told in turn.messages[0]["content"]
    assert turn.messages[0]["content"].startswith("error: ")
    assert turn.columns == {"tool_calls": 1, "tool_errors": 1}
    assert not turn.done


def test_several_calls_are_answered_in_order():
    turn = ToolEnvironment([multiply, look_up]).step(said(hermes("multiply", a=6, b=7) + hermes("look_up", word="x")))
    assert turn.messages == [
        {"role": "tool", "name": "multiply", "content": "42"},
        {"role": "tool", "name": "look_up", "content": '{"word": "x"}'},
    ]


def test_a_message_without_a_call_ends_the_conversation():
    assert ToolEnvironment([multiply]).step(said("It is 42.")).done


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ("text", "text"),
        (None, "null"),
        (4.5, "4.5"),
        ([1, 2], "[1, 2]"),
        (np.float32(0.5), "0.5"),
        (np.arange(2), "[0, 1]"),
    ],
)
def test_a_result_is_read_as_text_or_json(result, shown):
    def tool():
        return result

    assert answers(hermes("tool"), tool) == [shown]


@pytest.mark.parametrize("result", [b"bytes", object(), {1, 2}])
def test_another_type_is_an_error(result):
    def tool():
        return result

    assert "which is neither text nor JSON" in answers(hermes("tool"), tool)[0]


def test_a_huge_result_loses_its_middle():
    def flood():
        return "x" * 10_000_000

    [content] = answers(hermes("flood"), flood, most_characters=100)
    assert len(content) < 200
    assert "9,999,900 characters" in content


def test_a_tool_that_raises_exits_or_hangs_is_answered():
    def raises():
        raise KeyError("lost")

    def exits():
        raise SystemExit(0)

    def hangs():
        time.sleep(60)

    async def waits():
        await asyncio.sleep(60)

    tools = [raises, exits, hangs, waits]
    told = answers("".join(hermes(tool.__name__) for tool in tools), *tools, seconds=0.1)
    assert told[0] == "error: KeyError: 'lost'"
    assert told[1] == "error: SystemExit: 0"
    assert told[2] == told[3] == "error: TimeoutError: took longer than 0.1 s"


def test_a_tool_in_a_process_is_killed_where_a_thread_would_go_on(tmp_path):
    def holds_the_interpreter() -> int:
        (tmp_path / "pid").write_text(str(os.getpid()))
        return 3 ** (10**9)

    tools = in_processes([holds_the_interpreter, multiply], 1, seconds=0.5)
    told = answers(hermes("holds_the_interpreter") + hermes("multiply", a=6, b=7), *tools)
    assert told == ["error: TimeoutError: took longer than 0.5 s", "42"]
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()
    assert tool_schemas(tools[1:]) == tool_schemas([multiply])


def test_what_tools_in_processes_print_is_bounded_over_all_calls(capsys):
    def chatty() -> str:
        print("x" * 999)
        return ""

    [tool] = in_processes([chatty], 1)
    with bounded_output("tools"):
        for _ in range(9):
            tool()
    shown = capsys.readouterr().out
    assert shown.count("x") == SHOWN - 4
    assert "tools printed 9,000 characters here: the first 4,000 are shown" in shown


def test_what_a_killed_call_has_printed_is_shown(capsys):
    def stuck() -> None:
        print("waiting for the server")
        time.sleep(100)

    assert answers(hermes("stuck"), *in_processes([stuck], 1, seconds=0.5)) == [
        "error: TimeoutError: took longer than 0.5 s"
    ]
    assert capsys.readouterr().out == "waiting for the server\n"


def test_a_coroutine_function_needs_no_process():
    with pytest.raises(UserError, match="in_processes = 'look_up': expected functions"):
        in_processes([look_up], 1)
