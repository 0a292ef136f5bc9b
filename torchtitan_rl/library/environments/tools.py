"""Python functions as tools: their JSON schemas, the calls in a model's text, and an environment that answers them."""

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
"""A function or coroutine function with type hints and a docstring that describes each argument, as TRL's `tools=` takes."""

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class ToolCall(NamedTuple):
    """One call in a message: either a name and arguments, or what is wrong with it."""

    name: str
    arguments: dict[str, Any]
    error: str | None = None


def tool_schemas(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """JSON schemas, as chat templates take them.

    Raises:
        UserError: for two tools of one name, or one without type hints or a documented argument.
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
    """The tool calls in what a model said, in order; none: it says something else.

    Reads Qwen's and Hermes' `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, and Llama 3's bare
    `{"name": ..., "parameters": {...}}`, of which several are divided by ";".

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
        return ToolCall("", {}, f"the call is no JSON: {error}")
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ToolCall("", {}, 'the call has no "name"; write {"name": ..., "arguments": {...}}')
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the object as a string
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        return ToolCall(found["name"], {}, "the arguments are no JSON object")
    return ToolCall(found["name"], arguments)


class ToolEnvironment(Environment):
    """Answers tool calls until a message has none: that is the policy's last.

    Whatever goes wrong with a call (it cannot be read, there is no such tool, wrong arguments, the tool raises, takes too
    long or returns no text) is told to the policy in the tool's message and counted as `tool_errors`.
    """

    role = "tool"

    def __init__(self, tools: Sequence[Tool], *, seconds: float = 10.0, most_characters: int = 4000) -> None:
        """
        Args:
            seconds: longest time of one call.
            most_characters: of one result; a longer one loses its middle.
        """
        self._tools = {tool.__name__: tool for tool in tools}
        self._seconds = seconds
        self._most_characters = most_characters

    def step(self, message: Message) -> Turn:
        calls = parse_calls(message["content"])
        answers = [self._answer(call) for call in calls]
        return Turn(
            messages=[answer for answer, _ in answers],
            done=not calls,
            columns={"tool_calls": len(calls), "tool_errors": sum(failed for _, failed in answers)},
        )

    def _answer(self, call: ToolCall) -> tuple[Message, bool]:
        """The tool's message, and whether the call failed."""
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
    """A tool's result as the policy reads it: text as it is, anything else as JSON. Raises TypeError where there is none."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False, default=_listed)
    except (TypeError, ValueError, RecursionError):
        raise TypeError(f"the tool returned {type(result).__name__}, which is neither text nor JSON") from None


def _listed(value: Any) -> Any:
    """Numbers and lists of arrays and tensors."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError
