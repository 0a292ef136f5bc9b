"""Finds the tool calls in a message of the policy."""

import contextlib
import functools
import json
import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from torchtitan_rl.data.end_tokens import THINKING_TAGS

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_CHANNELS = re.compile(
    r"<\|channel\|>analysis.*?(?=<\|channel\|>|\Z)|<\|channel\|>final<\|message\|>", re.DOTALL
)
"""The thinking of gpt-oss, and the header of its answer."""
_NAME = re.compile(r'"name"\s*:\s*"([^"]*)"')


class ToolCall(NamedTuple):
    """One tool call in a message: a name with arguments, or the reason why it could not be parsed."""

    name: str
    arguments: dict[str, Any]
    error: str | None = None


CallParser = Callable[[str, Collection[str]], list[ToolCall]]
"""Returns the calls in a text, in order. The second argument is the names of the tools; of an agent's tools a dict, by name.
May raise for a broken call."""


def without_thinking(text: str) -> str:
    """Returns the text without its blocks of thinking: those in THINKING_TAGS, and the analysis channel of gpt-oss.

    A block that is not closed reaches to the end. A text that closes a block without opening it began inside one.

    Example: without_thinking("<think>I call f.</think>42") == "42"
    """
    for opens, closes in THINKING_TAGS:
        closed = text.find(closes)
        if 0 <= closed < f"{text}{opens}".find(opens):
            text = opens + text
        if opens in text:
            block = rf"{re.escape(opens)}.*?(?:{re.escape(closes)}|\Z)"
            text = re.sub(block, "", text, flags=re.DOTALL)
    return _CHANNELS.sub("", text)


def opened_thinking(prompt: str) -> str:
    """Returns the tag at the end of a rendered prompt that opens a block of thinking, which the turn begins in; "" if none."""
    return next((opens for opens, _ in THINKING_TAGS if prompt.rstrip().endswith(opens)), "")


def parse_calls(text: str, tools: Collection[str] = ()) -> list[ToolCall]:
    """Returns the tool calls in a text, in order; empty if it has none. The parser of `tool_call_parser` auto.

    Two formats are recognised: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Qwen, Hermes), and a bare
    `{"name": ..., "parameters": {...}}` (Llama 3), where ";" separates several calls. Bare JSON is a call only if it has
    arguments or its name is one of `tools`.

    Example: parse_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>') == [ToolCall("add", {"a": 1})]
    """
    if "<tool_call>" in text:
        return [_parse_call(call) for call in _HERMES.findall(text)]
    bare = text.replace("<|python_tag|>", "").strip()
    named = _NAME.search(bare) if bare.startswith("{") else None
    if named is None or not (named[1] in tools or '"parameters"' in bare or '"arguments"' in bare):
        return []
    decoder, calls = json.JSONDecoder(), []
    while bare:
        try:
            _, end = decoder.raw_decode(bare)
        except (ValueError, RecursionError):
            end = len(bare)
        calls.append(_parse_call(bare[:end]))
        bare = bare[end:].lstrip("; \n")
    return calls


def _parse_call(text: str) -> ToolCall:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"the call is not valid JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", {}, 'the call has no "name"; write {"name": ..., "arguments": {...}}')
    return tool_call(call["name"], call.get("arguments", call.get("parameters")) or {})


def suits(arguments: dict[str, Any], schema: Any) -> bool:
    """Whether a call's arguments are as its tool's JSON schema asks. True if the schema itself cannot be followed."""
    if not isinstance(schema, dict):
        return True
    try:
        return _validator(json.dumps(schema)).is_valid(arguments)
    except Exception:  # such as a reference to nowhere, a pattern that is not Python's, or a NaN
        return True


@functools.lru_cache(maxsize=256)
def _validator(schema: str) -> "Draft202012Validator":
    """A validator of the schema, which is given as JSON. Raises if it is not valid. To make one takes 0.5 ms of CPU."""
    from jsonschema import Draft202012Validator  # vLLM brings it
    from referencing import Registry

    content = json.loads(schema)
    Draft202012Validator.check_schema(content)
    return Draft202012Validator(content, registry=Registry())  # by default it loads addresses


def tool_call(name: str, arguments: Any) -> ToolCall:
    """Returns the call. Arguments may be a dict, or a string with a JSON object, as some models write them."""
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, "the arguments are not a JSON object")
    return ToolCall(name, arguments)
