"""OpenAI's Responses API (`/v1/responses`) in terms of chat completions, as far as agents use it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan_rl.environments.agents.settings import NotFollowed

_SAID = ("message", "function_call", "reasoning")
"""Types of the items that one turn of the policy may consist of."""


def as_chat(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the chat request that a Responses request stands for. Raises NotFollowed for items and tools of other kinds."""
    chat = {
        name: value
        for name, value in asked.items()
        if name not in ("input", "instructions", "tools", "text")
    }
    messages: list[dict[str, Any]] = []
    if asked.get("instructions"):
        messages.append({"role": "system", "content": asked["instructions"]})
    given = asked.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    chat["messages"] = messages + _messages(items) if isinstance(items, list) else []
    if asked.get("tools"):
        chat["tools"] = [_tool(tool) for tool in asked["tools"]]
    text = asked.get("text")
    if isinstance(text, dict) and text.get("format") is not None:
        chat["response_format"] = text["format"]
    return chat


def _messages(items: Sequence[Any]) -> list[dict[str, Any]]:
    """The items as messages. Those of one turn of the policy, its thinking, a text and calls, become one message."""
    messages: list[dict[str, Any]] = []
    is_said = False  # whether the last message is one that the next item of the policy belongs to
    for item in items:
        if not isinstance(item, dict):
            raise NotFollowed(
                "input", f"the agent's request has the item {str(item)[:80]!r}; expected an object"
            )
        kind = item.get("type", "message")
        if kind == "reasoning":
            if thinking := _thinking(item):
                messages.append(
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [],
                        "reasoning_content": thinking,
                    }
                )
                is_said = True
        elif kind == "function_call_output":
            output = item.get("output")
            messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(output)}
            )
            is_said = False
        elif kind == "function_call" or (kind == "message" and item.get("role") == "assistant"):
            if not is_said or (kind == "message" and messages[-1]["tool_calls"]):
                messages.append({"role": "assistant", "content": "", "tool_calls": []})
            is_said = True
            if kind == "message":
                messages[-1]["content"] += _text(item.get("content"))
            else:
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                messages[-1]["tool_calls"].append({"id": item.get("call_id"), "function": function})
        elif kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
            is_said = False
        else:
            raise NotFollowed(
                "input", f"the agent's request has an item of type {kind}; expected one of {_SAID}"
            )
    return messages


def _thinking(item: Mapping[str, Any]) -> Any:
    """The text of a reasoning item, or else its summary. Raises NotFollowed if it is encrypted."""
    text = _text(item.get("content")) or _text(item.get("summary"))
    if not text and item.get("encrypted_content"):
        reason = "the agent's request has a reasoning item with encrypted_content alone, which only OpenAI can read"
        raise NotFollowed("input", f"{reason}; expected its text in content or summary")
    return text


def _text(content: Any) -> Any:
    """The text of an item's content, whose parts may be of type input_text, output_text or refusal."""
    if not isinstance(content, list):
        return content or ""
    return "".join(
        str(part.get("text") or part.get("refusal") or "")
        for part in content
        if isinstance(part, dict)
    )


def _tool(tool: Any) -> dict[str, Any]:
    """A function in the form of chat completions, which has its facts one level deeper."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise NotFollowed(
            "tools", f"the agent's request has the tool {str(tool)[:80]!r}; expected functions"
        )
    facts = {
        key: value for key, value in tool.items() if key in ("name", "description", "parameters")
    }
    return {"type": "function", "function": facts}


def from_completion(completion: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the response that says the same as a chat completion."""
    [choice] = completion["choices"]
    said, number, usage = (
        choice["message"],
        completion["id"].removeprefix("chatcmpl-"),
        completion["usage"],
    )
    output: list[dict[str, Any]] = []
    if said["content"] or not said.get("tool_calls"):
        part = {
            "type": "output_text",
            "text": said["content"] or "",
            "annotations": [],
            "logprobs": [],
        }
        output.append(
            {
                "id": f"msg_{number}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    for call in said.get("tool_calls", ()):
        output.append(
            {
                "id": f"fc_{call['id']}",
                "type": "function_call",
                "call_id": call["id"],
                "status": "completed",
            }
            | call["function"]
        )
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 0,
        "status": "completed",
        "model": completion["model"],
        "output": output,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def streamed(response: Mapping[str, Any]) -> str:
    """Returns a response as the events of a stream, each item in one piece."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(response["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        opened = {**item, "status": "in_progress"}
        opened |= {"content": []} if item["type"] == "message" else {"arguments": ""}
        events.append({"type": "response.output_item.added", "output_index": index, "item": opened})
        if item["type"] == "message":
            [part] = item["content"]
            place = {**at, "content_index": 0}
            events += [
                {"type": "response.content_part.added", **place, "part": {**part, "text": ""}},
                {
                    "type": "response.output_text.delta",
                    **place,
                    "delta": part["text"],
                    "logprobs": [],
                },
                {
                    "type": "response.output_text.done",
                    **place,
                    "text": part["text"],
                    "logprobs": [],
                },
                {"type": "response.content_part.done", **place, "part": part},
            ]
        else:
            said = {"name": item["name"], "arguments": item["arguments"]}
            events += [
                {
                    "type": "response.function_call_arguments.delta",
                    **at,
                    "delta": item["arguments"],
                },
                {"type": "response.function_call_arguments.done", **at, **said},
            ]
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": "response.completed", "response": response})
    lines = [
        f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': number})}\n\n"
        for number, event in enumerate(events)
    ]
    return "".join(lines)
