"""OpenAI's Responses API (`/v1/responses`) in terms of chat completions, as far as agents use it."""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan_rl.environments.agents.settings import NotFollowed, log_once, text_of

_OF_POLICY = ("message", "function_call", "reasoning")
"""Types of the items that one turn of the policy may consist of."""


def as_chat(request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the chat request that a Responses request stands for. Tools that are not functions are left out.

    Raises NotFollowed for items of other kinds.
    """
    elsewhere = ("input", "instructions", "tools", "text")
    chat = {name: value for name, value in request.items() if name not in elsewhere}
    items = request["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    chat["messages"] = _messages(items)
    if request.get("instructions"):
        chat["messages"].insert(0, {"role": "system", "content": request["instructions"]})
    tools = request.get("tools") or ()
    chat["tools"] = [_tool(tool) for tool in tools if tool["type"] == "function"]
    left_out = ", ".join(sorted({str(tool["type"]) for tool in tools} - {"function"}))
    if left_out:
        of_type = f"agents' tools of type {left_out}"
        log_once(f"{of_type} are left out: only functions are followed", logging.WARNING)
    chat["response_format"] = (request.get("text") or {}).get("format")
    return chat


def _messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The items as messages. Those of one turn of the policy, its thinking, a text and calls, become one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        kind, role = item.get("type", "message"), item.get("role")
        is_text = kind == "message" and role == "assistant"
        if kind == "reasoning":
            if thinking := _thinking(item):
                messages.append(_empty_turn() | {"reasoning_content": thinking})
        elif is_text or kind == "function_call":
            in_turn = bool(messages) and messages[-1]["role"] == "assistant"
            if not in_turn or (is_text and messages[-1]["tool_calls"]):
                messages.append(_empty_turn())
            if is_text:
                messages[-1]["content"] += text_of(item.get("content"), "input")
            else:
                function = {"name": item["name"], "arguments": item["arguments"]}
                messages[-1]["tool_calls"].append({"id": item["call_id"], "function": function})
        elif kind == "function_call_output":
            result = text_of(item.get("output"), "input")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": result})
        elif kind == "message":
            messages.append({"role": role, "content": item.get("content")})
        else:
            reason = f"the agent's request has an item of type {kind}"
            raise NotFollowed("input", f"{reason}; expected one of {_OF_POLICY}")
    return messages


def _empty_turn() -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": []}


def _thinking(item: Mapping[str, Any]) -> Any:
    """The text of a reasoning item, or else its summary. Raises NotFollowed if it is encrypted."""
    text = text_of(item.get("content"), "input") or text_of(item.get("summary"), "input")
    if not text and item.get("encrypted_content"):
        reason = "the agent's request has a reasoning item with encrypted_content alone, which only OpenAI can read"
        raise NotFollowed("input", f"{reason}; expected its text in content or summary")
    return text


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function in the form of chat completions, which has its facts one level deeper."""
    function = {key: tool[key] for key in ("name", "description", "parameters") if key in tool}
    return {"type": "function", "function": function}


def from_completion(completion: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the response that says the same as a chat completion."""
    [choice] = completion["choices"]
    message, usage = choice["message"], completion["usage"]
    number, calls = completion["id"].removeprefix("chatcmpl-"), message.get("tool_calls", ())
    output: list[dict[str, Any]] = []
    if message["content"] or not calls:
        text = message["content"] or ""
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        item = {"id": f"msg_{number}", "type": "message", "role": "assistant"}
        output.append({**item, "status": "completed", "content": [part]})
    for call in calls:
        item = {"id": f"fc_{call['id']}", "type": "function_call", "call_id": call["id"]}
        output.append({**item, "status": "completed", **call["function"]})
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
        place = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            [part] = item["content"]
            place["content_index"] = 0
            text = {"text": part["text"], "logprobs": []}
            delta = {"delta": part["text"], "logprobs": []}
            opened = {"content": []}
            contents = [
                {"type": "response.content_part.added", "part": {**part, "text": ""}},
                {"type": "response.output_text.delta", **delta},
                {"type": "response.output_text.done", **text},
                {"type": "response.content_part.done", "part": part},
            ]
        else:
            call = {"name": item["name"], "arguments": item["arguments"]}
            opened = {"arguments": ""}
            contents = [
                {"type": "response.function_call_arguments.delta", "delta": item["arguments"]},
                {"type": "response.function_call_arguments.done", **call},
            ]
        opened = {**item, "status": "in_progress", **opened}
        events.append({"type": "response.output_item.added", "output_index": index, "item": opened})
        events += [{**content, **place} for content in contents]
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": "response.completed", "response": response})
    lines = [
        f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': number})}\n\n"
        for number, event in enumerate(events)
    ]
    return "".join(lines)
