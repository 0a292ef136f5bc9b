"""Functions as tools: schemas, the calls in a text, and what each bad call is answered."""

import asyncio
import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Literal

import numpy as np
import pytest

from torchtitan_rl.data.tool_calls import ToolCall, parse_calls, suits
from torchtitan_rl.data.tool_schemas import tool_schemas
from torchtitan_rl.environments.tools import ToolEnvironment, in_process
from torchtitan_rl.errors import UserError


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


def hermes(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


def answers(text: str, *tools, **options) -> list[str]:
    environment = ToolEnvironment([in_process(tool) for tool in tools], **options)
    return [message["content"] for message in environment.step(said(text)).messages]


def test_tool_function_without_a_valid_schema_is_a_user_error():
    def bare(a):
        return a

    with pytest.raises(UserError, match="tools: bare: expected a function with type hints"):
        tool_schemas([multiply, bare])
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
        ('<tool_call>{"name": "now", "arguments": ""}</tool_call>', [ToolCall("now", {})]),
        ('<tool_call>{"name": "now", "arguments": null}</tool_call>', [ToolCall("now", {})]),
        ('{"answer": 4}', []),
    ],
)
def test_tool_calls_are_parsed_in_both_formats(text, calls):
    assert parse_calls(text) == calls


@pytest.mark.parametrize(
    ("schema", "argument", "suited"),
    [
        ({"type": "integer"}, 1, True),
        ({"type": "integer"}, "1", False),
        ({"type": "number or so"}, 1, True),
        ({"type": "string", "pattern": r"^\p{L}+$"}, "one", True),  # of JavaScript
        ({"multipleOf": 0.5}, float("nan"), True),
    ],
)
def test_arguments_suit_a_schema_that_cannot_judge_them(schema, argument, suited):
    assert suits({"a": argument}, {"properties": {"a": schema}}) == suited


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
def test_invalid_tool_call_is_reported_to_the_policy_and_counted(text, told):
    turn = ToolEnvironment([multiply]).step(said(text))
    assert told in turn.messages[0]["content"]
    assert turn.messages[0]["content"].startswith("error: ")
    assert turn.columns == {"tool_calls": 1, "tool_errors": 1}
    assert not turn.done


@pytest.mark.parametrize(
    "schema",
    [{"$ref": "#/$defs/gone"}, {"multipleOf": 0.01}, {"pattern": r"^\p{L}"}, {"type": "colour"}, {"$id": 5}],
)
def test_no_call_is_wrong_by_a_schema_that_cannot_be_followed(schema):
    for value in (10**400, "a"):
        assert suits({"a": value}, {"type": "object", "properties": {"a": schema}})


def test_schema_at_an_address_is_not_loaded():
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"type": "string"}')

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/a.json"
        assert suits({"a": 1}, {"properties": {"a": {"$ref": address}}})
        server.shutdown()


@pytest.mark.parametrize(
    ("result", "shown"),
    [("text", "text"), (None, "null"), ([1, 2], "[1, 2]"), (np.float32(0.5), "0.5"), (np.arange(2), "[0, 1]")],
)
def test_tool_result_is_shown_as_text_or_json(result, shown):
    def tool():
        return result

    assert answers(hermes("tool"), tool) == [shown]


def test_long_tool_result_is_cut_in_the_middle():
    def flood():
        return "x" * 10_000_000

    [content] = answers(hermes("flood"), flood, most_characters=100)
    assert len(content) <= 100
    assert "9,999,933 characters" in content


def test_failing_exiting_or_hanging_tool_gives_an_error_answer():
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


def test_calls_wait_for_any_free_place_and_not_for_the_one_of_a_call_that_hangs():
    def hangs():
        time.sleep(60)

    def quick(n: int):
        return n

    text = hermes("hangs") + "".join(hermes("quick", n=n) for n in range(4))
    told = answers(text, hangs, quick, seconds=1.0, side_by_side=2)
    assert told == ["error: TimeoutError: took longer than 1 s", "0", "1", "2", "3"]


def test_coroutine_without_a_time_limit_is_waited_for():
    async def waits():
        await asyncio.sleep(0.01)
        return 42

    assert answers(hermes("waits"), waits, seconds=math.inf) == ["42"]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_async_tool_that_exits_keeps_the_event_loop_running(error):
    async def exits():
        raise error

    async def leaves_it_to_a_task():
        await asyncio.gather(exits(), asyncio.sleep(0))

    async def fine():
        await asyncio.sleep(0.01)
        return 42

    for tool in (exits, leaves_it_to_a_task):
        assert answers(hermes(tool.__name__), tool, seconds=5) == [f"error: {error.__name__}: "]
        assert answers(hermes("fine"), fine, seconds=5) == ["42"]


@pytest.mark.parametrize(
    "thought",
    ["<think>{call}</think>It is 42.", "<think>\nFirst {call}", "{call}\n</think>It is 42.", "It is <think>{call}</think>"],
)  # fmt: skip
def test_tool_call_inside_a_think_block_is_not_run(thought):
    turn = ToolEnvironment([multiply]).step(said(thought.format(call=hermes("multiply", a=6, b=7))))
    assert (turn.done, turn.columns["tool_calls"]) == (True, 0)
    call = hermes("multiply", a=6, b=7)
    assert ToolEnvironment([multiply]).step(said(f"<think>{call}</think>{call}")).columns["tool_calls"] == 1


def test_wrong_argument_types_are_reported_to_the_policy():
    def repeat(a: int, ratio: float = 1.0, names: list[str] | None = None, unit: Literal["s", "ms"] = "s") -> str:
        return str(a * 3)

    def told(**arguments) -> str:
        return answers(hermes("repeat", **arguments), repeat)[0]

    assert told(a="3") == 'error: TypeError: argument a is "3": input should be a valid integer'
    assert told(a=True).startswith("error: TypeError: argument a is true")
    assert told(a=3, ratio="x").startswith('error: TypeError: argument ratio is "x"')
    assert told(a=3, names=["x", 1]).startswith('error: TypeError: argument names is ["x", 1]')
    assert "'s' or 'ms'" in told(a=3, unit="h")
    assert told(a=3, ratio=1, names=None, unit="ms") == "9"


def test_turn_starting_inside_a_think_block_has_no_call_before_its_end():
    environment = ToolEnvironment([multiply])
    environment.fit(conversation=None, call_seconds=60, most_characters=100, parser=parse_calls, begins_thinking=True)
    call = hermes("multiply", a=6, b=7)
    assert environment.step(said(f"I might {call}")).done
    assert environment.step(said(f"I {call} might</think>{call}")).columns["tool_calls"] == 1
