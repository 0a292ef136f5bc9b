"""Reads chat messages and tools of a row, in the forms that people have them, as a chat template expects them."""

import contextlib
import json
import re
from collections.abc import Callable
from typing import Any

from torchtitan_rl.data.chat_messages import REASONING, Message, Tools
from torchtitan_rl.data.table import Row, RowError

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""Names of `from` in ShareGPT's form that are no roles."""
_WEIGHTS = ("weight", "loss_weight", "loss_mask", "loss", "train", "training", "trainable")
"""Fields by which other trainers say whether an assistant's turn is learned."""


_MEDIA = ("image", "images", "video", "videos", "audio", "audios")


def check_has_no_media(row: Row) -> None:
    """Raises RowError if a row has an image, a video or a sound beside its text. A text in a column "image" may be a name."""
    for column in _MEDIA:
        value = row.get(column)
        is_name = isinstance(value, str) and not column.endswith("s")
        if value and value != "[]" and isinstance(value, list | dict | bytes | str) and not is_name:
            raise RowError(
                f"something in {column!r}, but policies read text alone; leave the column or the row out"
            )


def prompt_messages(given: list[Any]) -> list[Message]:
    """Returns checked chat messages. Raises RowError for an invalid message or if the last turn is not the user's."""
    messages = read_messages(given)
    if not messages:
        raise RowError("no message of the user's before the assistant's turn")
    if messages[-1]["role"] == "system":
        raise RowError("a system message last, in place of the user's turn")
    if messages[-1]["role"] == "assistant":
        raise RowError(
            "messages do not end with the user's turn (task.demonstrations last, as in the config sft, learns the assistant's)"
        )
    if not messages[-1]["content"].strip():
        raise RowError("a last message without text")
    return messages


def read_messages(given: list[Any]) -> list[Message]:
    """Returns checked chat messages with all fields that a template may read. Raises RowError for an invalid one."""
    return [_message(one) for one in given]


def _message(given: Any) -> Message:
    if isinstance(given, dict) and "from" in given and "role" not in given:
        given = _from_sharegpt(given)
    if not isinstance(given, dict) or not is_text(given.get("role")):
        raise RowError("a message without a role")
    role = given["role"]
    if role not in ROLES:
        raise RowError(f"a message with the role {role!r}, which is none of {', '.join(ROLES)}")
    if given.get("function_call"):
        raise RowError("a message with function_call, of OpenAI's first form; write tool_calls")
    for field in _WEIGHTS:
        if role == "assistant" and given.get(field) not in (None, 1):
            raise RowError(
                f"an assistant's message with {field} {given[field]!r}, which would be learned as any other; leave {field} out"
            )
    message = {
        field: value for field, value in given.items() if value is not None
    }  # Arrow has null for a missing field
    calls = message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = _read_list(calls, _call, "tool_calls")
    if "content" not in message and (calls or any(message.get(field) for field in REASONING)):
        message["content"] = ""
    if isinstance(message.get("content"), list):
        message["content"] = "".join(map(_part, message["content"]))
    if not all(is_text(message.get(field, "")) for field in REASONING) or not is_text(
        message.get("content")
    ):
        raise RowError("a message whose content is not text")
    return message


def _part(given: Any) -> str:
    """Returns the text of a part, {"type": "text", "text": "Hi"}. Raises RowError for another, such as an image."""
    kind = given.get("type") if isinstance(given, dict) else type(given).__name__
    if kind != "text" or not is_text(given.get("text")):
        raise RowError(
            f"a message with a part of type {kind!r}; expected parts of type 'text', as policies read text alone"
        )
    return given["text"]


def _from_sharegpt(given: dict[str, Any]) -> Message:
    """Returns a message in ShareGPT's form, {"from": "human", "value": "Hi"}, in OpenAI's."""
    role, value = given["from"], given.get("value", given.get("content"))
    message = {"role": _SHAREGPT_ROLES.get(role, role), "content": value}
    return message if role != "function_call" else {**message, "content": "", "tool_calls": value}


def read_tools(given: Any) -> Tools | None:
    """Returns a row's tools in OpenAI's form; None if it has none. Raises RowError if they are no list of functions."""
    return _read_list(given, _tool, "tools") or None


def _tool(given: Any) -> dict[str, Any]:
    function = _function(given, "tools")
    return (
        {"type": "function", **given}
        if function is not given
        else {"type": "function", "function": given}
    )


def _call(given: Any) -> dict[str, Any]:
    """Returns a tool call. Arguments as JSON text become an object, as some templates would write the text in quotes."""
    function = _function(given, "tool_calls")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise RowError(f"a call of {function['name']!r} whose arguments are no JSON object")
    called = {"function": {**function, "arguments": arguments}}
    return (
        {"type": "function", **given, **called}
        if function is not given
        else {"type": "function", **called}
    )


def written_calls(given: Any) -> list[Any] | None:
    """Returns the calls in a list of them or its JSON text, as in xlam's `answers`; None for anything else."""
    with contextlib.suppress(ValueError, RecursionError):
        given = json.loads(given) if isinstance(given, str) else given
    listed = given if isinstance(given, list) else []
    are_calls = all(isinstance(one, dict) and {"name", "arguments"} <= one.keys() for one in listed)
    return listed if listed and are_calls else None


def _function(given: Any, field: str) -> dict[str, Any]:
    """Returns what describes a function, which may be a level deeper. Raises RowError if it has no name."""
    function = given.get("function", given) if isinstance(given, dict) else None
    if not isinstance(function, dict) or not is_text(function.get("name")):
        raise RowError(f"{field} is no list of functions with names, in OpenAI's form")
    return function


def _read_list(given: Any, read: Callable[[Any], dict[str, Any]], field: str) -> list[Any]:
    """Returns the items of a list or of its JSON text, each as `read` returns it."""
    if isinstance(given, str):
        try:
            given = json.loads(given.strip() or "[]")
        except (ValueError, RecursionError) as error:
            raise RowError(f"{field} is neither a list nor its JSON text") from error
    listed = [given] if isinstance(given, dict) else given or []
    if not isinstance(listed, list):
        raise RowError(f"{field} is neither a list nor its JSON text")
    return [read(one) for one in listed]


def without_nulls(value: Any) -> Any:
    """Returns a JSON value without the null entries of its objects, which Arrow adds where other rows have a value."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return value


def is_text(value: Any) -> bool:
    """Returns whether the value is a string that UTF-8 can encode.

    JSON can contain lone surrogates such as "\\ud800".
    """
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)
