"""Reads chat messages and tools of a row, in the forms that people have them, as a chat template expects them."""

import contextlib
import json
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
    for column, value in row.items():
        is_name = isinstance(value, str) and (value == "[]" or not column.endswith("s"))
        is_media = column in _MEDIA and isinstance(value, list | dict | bytes | str) and not is_name
        is_stored = isinstance(value, dict) and isinstance(value.get("bytes"), bytes)
        if value and (is_media or is_stored):
            raise RowError(f"something in {column!r}, but policies read text alone; leave it out")


def prompt_messages(records: list[Any]) -> list[Message]:
    """Returns checked chat messages. Raises RowError for an invalid message or if the last turn is not the user's."""
    messages = read_messages(records)
    is_question = messages and messages[-1]["role"] not in ("system", "assistant")
    if not is_question or not messages[-1]["content"].strip():
        raise RowError(
            "messages that do not end with the user's turn (task.demonstrations last, as in the config sft, learns the assistant's)"
        )
    return messages


def read_messages(records: list[Any]) -> list[Message]:
    """Returns checked chat messages with all fields that a template may read. Raises RowError for an invalid one."""
    return [_message(record) for record in records]


def _message(record: Any) -> Message:
    if isinstance(record, dict) and isinstance(record.get("from"), str) and "role" not in record:
        record = _from_sharegpt(record)
    if not isinstance(record, dict) or not isinstance(record.get("role"), str):
        raise RowError("a message without a role")
    role = record["role"]
    if role not in ROLES:
        raise RowError(f"a message with the role {role!r}, which is none of {', '.join(ROLES)}")
    if record.get("function_call"):
        raise RowError("a message with function_call, of OpenAI's first form; write tool_calls")
    for field in _WEIGHTS:
        if role == "assistant" and record.get(field) not in (None, 1):
            raise RowError(
                f"an assistant's message with {field} {record[field]!r}, which would be learned as any other; leave {field} out"
            )
    # Arrow has null for a missing field.
    message = {field: value for field, value in record.items() if value is not None}
    calls = _read_list(message.pop("tool_calls", None) or [], _call, "tool_calls")
    if calls:
        message["tool_calls"] = calls
    thoughts = [message[field] for field in REASONING if field in message]
    content = message.get("content", "" if calls or any(thoughts) else None)
    if isinstance(content, list):
        content = "".join(map(_part, content))
    if not all(isinstance(text, str) for text in (content, *thoughts)):
        raise RowError("a message whose content is not text")
    return {**message, "content": content}


def _part(part: Any) -> str:
    """Returns the text of a part, {"type": "text", "text": "Hi"}. Raises RowError for another, such as an image."""
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise RowError(
            f"a message with a part of type {kind!r}; expected parts of type 'text', as policies read text alone"
        )
    return part["text"]


def _from_sharegpt(record: dict[str, Any]) -> Message:
    """Returns a message in ShareGPT's form, {"from": "human", "value": "Hi"}, in OpenAI's."""
    role, text = record["from"], record.get("value", record.get("content"))
    if role == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": text}
    return {"role": _SHAREGPT_ROLES.get(role, role), "content": text}


def read_tools(tools: Any) -> Tools | None:
    """Returns a row's tools in OpenAI's form; None if it has none. Raises RowError if they are no list of functions."""
    return _read_list(tools, _tool, "tools") or None


def _tool(tool: Any) -> dict[str, Any]:
    outer, function = _outer_and_function(tool, "tools")
    return {"type": "function", **outer, "function": function}


def _call(call: Any) -> dict[str, Any]:
    """Returns a tool call. Arguments as JSON text become an object, as some templates would write the text in quotes."""
    outer, function = _outer_and_function(call, "tool_calls")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise RowError(f"a call of {function['name']!r} whose arguments are no JSON object")
    return {"type": "function", **outer, "function": {**function, "arguments": arguments}}


def written_calls(calls: Any) -> list[Any] | None:
    """Returns the calls in a list of them or its JSON text, as in xlam's `answers`; None for anything else."""
    if isinstance(calls, str):
        with contextlib.suppress(ValueError, RecursionError):
            calls = json.loads(calls)
    if not isinstance(calls, list) or not calls:
        return None
    are_calls = all(isinstance(c, dict) and {"name", "arguments"} <= c.keys() for c in calls)
    return calls if are_calls else None


def _outer_and_function(record: Any, field: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the fields around a function, {} if there are none, and the function. Raises RowError if it has no name."""
    outer, function = {}, record
    if isinstance(record, dict) and "function" in record:
        outer, function = record, record["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(f"{field} is no list of functions with names, in OpenAI's form")
    return outer, function


def _read_list(value: Any, read: Callable[[Any], dict[str, Any]], field: str) -> list[Any]:
    """Returns the items of a list or of its JSON text, each as `read` returns it."""
    if isinstance(value, str):
        try:
            value = json.loads(value.strip() or "[]")
        except (ValueError, RecursionError) as error:
            raise RowError(f"{field} is neither a list nor its JSON text") from error
    items = [value] if isinstance(value, dict) else value or []
    if not isinstance(items, list):
        raise RowError(f"{field} is neither a list nor its JSON text")
    return [read(item) for item in items]
