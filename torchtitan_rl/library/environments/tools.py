"""Python functions as tools: JSON schemas, parsing of tool calls, and the environment that runs them."""

import contextlib
import inspect
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torchtitan_rl.core.errors import UserError, expect
from torchtitan_rl.core.generator.environment import Environment, Message, Turn
from torchtitan_rl.core.text import head_and_tail
from torchtitan_rl.library.environments.threads import call_with_timeout, resolve

Tool = Callable[..., Any]
"""A function or coroutine function with type hints and a docstring that describes each argument, as in TRL's
`tools=`."""

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class ToolCall(NamedTuple):
    """One tool call in a message: a name with arguments, or the reason why it could not be parsed."""

    name: str
    arguments: dict[str, Any]
    error: str | None = None


def tool_schemas(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Returns the tools' JSON schemas in the form that chat templates expect.

    Raises:
        UserError: if two tools have the same name, or an argument has no type hint or no description.
    """
    from transformers.utils import get_json_schema

    names = [getattr(tool, "__name__", repr(tool)) for tool in tools]
    expect(len({*names}) == len(names), "tools", names, "one tool of each name", "Rename one.")
    try:
        return [get_json_schema(tool) for tool in tools]
    except Exception as error:
        raise UserError(
            f"tools = {names}: expected functions with type hints and a Google-style docstring with a line for each "
            f"argument: {error}"
        ) from error


def parse_calls(text: str) -> list[ToolCall]:
    """Returns the tool calls in a message of the policy, in order; empty if it has none.

    Two formats are recognised: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Qwen, Hermes), and a bare
    `{"name": ..., "parameters": {...}}` (Llama 3), where ";" separates several calls.

    Example: parse_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>') == [ToolCall("add", {"a": 1})]
    """
    if "<tool_call>" in text:
        return [_parse_call(found) for found in _HERMES.findall(text)]
    bare = text.replace("<|python_tag|>", "").strip()
    if not (bare.startswith("{") and '"name"' in bare):
        return []
    decoder, calls = json.JSONDecoder(), []
    while bare:
        try:
            _, end = decoder.raw_decode(bare)
        except ValueError:
            end = len(bare)
        calls.append(_parse_call(bare[:end]))
        bare = bare[end:].lstrip("; \n")
    return calls


def _parse_call(text: str) -> ToolCall:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"the call is not valid JSON: {error}")
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ToolCall("", {}, 'the call has no "name"; write {"name": ..., "arguments": {...}}')
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the object as a string
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        return ToolCall(found["name"], {}, "the arguments are not a JSON object")
    return ToolCall(found["name"], arguments)


class ToolEnvironment(Environment):
    """Runs the tool calls in each message of the policy. A message without a call ends the conversation.

    A failed call is reported to the policy in the tool's message and counted as `tool_errors`. A call fails if it
    cannot be parsed, names an unknown tool, has wrong arguments, raises, times out, or returns a value that is not text
    or JSON.
    """

    role = "tool"

    def __init__(self, tools: Sequence[Tool], *, seconds: float = 10.0, most_characters: int = 4000) -> None:
        """
        Args:
            seconds: time limit of one call.
            most_characters: maximum length of one result; the middle of a longer one is cut out.
        """
        self._tools = {tool.__name__: tool for tool in tools}
        self._seconds = seconds
        self._most_characters = most_characters

    def step(self, message: Message) -> Turn:
        """Returns the answers of the message's calls; without a call the conversation is done."""
        calls = parse_calls(message["content"])
        answers = [self._answer(call) for call in calls]
        return Turn(
            messages=[answer for answer, _ in answers],
            done=not calls,
            columns={"tool_calls": len(calls), "tool_errors": sum(failed for _, failed in answers)},
        )

    def _answer(self, call: ToolCall) -> tuple[Message, bool]:
        """Returns the tool's message, and whether the call failed."""
        try:
            content, failed = result_text(self._result(call)), False
        except (Exception, SystemExit) as error:
            content, failed = f"error: {type(error).__name__}: {error}", True
        content = head_and_tail(content, self._most_characters)
        return {"role": "tool", "name": call.name or "unknown", "content": content}, failed

    def _result(self, call: ToolCall) -> Any:
        if call.error is not None:
            raise ValueError(call.error)
        if call.name not in self._tools:
            raise LookupError(f"there is no tool {call.name!r}; there are {sorted(self._tools)}")
        tool = self._tools[call.name]
        inspect.signature(tool).bind(**call.arguments)
        if inspect.iscoroutinefunction(tool):
            return resolve(tool(**call.arguments), self._seconds)
        return call_with_timeout(self._seconds, tool, **call.arguments)


def result_text(result: Any) -> str:
    """Returns a tool's result as text: a string as it is, anything else as JSON.

    Raises TypeError if neither is possible.
    """
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False, default=_listed)
    except (TypeError, ValueError, RecursionError):
        raise TypeError(f"the tool returned {type(result).__name__}, which is neither text nor JSON") from None


def _listed(value: Any) -> Any:
    """Converts arrays and tensors to numbers and lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError
