"""Anthropic's Messages API (`/v1/messages`) in terms of chat completions, as far as agents use it."""

import json
from collections.abc import Mapping
from typing import Any

from torchtitan_rl.environments.agents.settings import NotFollowed

_ELSEWHERE = ("messages", "system", "tools", "tool_choice", "output_config")
"""Fields that have another place in a chat request."""


def as_chat(request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the chat request that a Messages request stands for. Raises NotFollowed for blocks and tools of other kinds."""
    chat = {name: value for name, value in request.items() if name not in _ELSEWHERE}
    messages: list[Any] = []
    if request.get("system"):
        messages.append({"role": "system", "content": request["system"]})
    for message in request["messages"]:
        messages += _messages(message)
    chat["messages"] = messages
    if messages and messages[-1]["role"] == "assistant":
        reason = "the agent's request begins the policy's turn for it; end with a user's message"
        raise NotFollowed("messages", reason)
    chat["tools"] = [_tool(tool) for tool in request.get("tools") or ()]
    if choice := request.get("tool_choice"):
        kinds = {"any": "required", "tool": {"type": "function", "name": choice.get("name")}}
        chat["tool_choice"] = kinds.get(choice["type"], choice["type"])
    older_form = chat.pop("output_format", None)
    chat["response_format"] = (request.get("output_config") or {}).get("format", older_form)
    return chat


def _messages(message: Mapping[str, Any]) -> list[Any]:
    """A message in the form of chat completions. The results of tools in it become messages of their own, before its text."""
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        return [message]
    texts: list[Any] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in content:
        kind = block["type"]
        if kind == "text":
            texts.append(block)
        elif kind == "tool_use":
            function = {"name": block["name"], "arguments": json.dumps(block["input"])}
            calls.append({"id": block["id"], "function": function})
        elif kind == "tool_result":
            call_id, result = block["tool_use_id"], block.get("content")
            results.append({"role": "tool", "tool_call_id": call_id, "content": result})
        elif kind not in ("thinking", "redacted_thinking"):
            reason = f"the agent's request has a block of type {kind}"
            raise NotFollowed("messages", f"{reason}; expected text, tool_use or tool_result")
    if role == "assistant":
        return [{"role": role, "content": texts, "tool_calls": calls}]
    if texts or not results:
        results.append({"role": role, "content": texts})
    return results


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in the form of chat completions. Those that Anthropic's servers run have a type of their own."""
    if tool.get("type", "custom") != "custom":
        reason = f"the agent's request has the tool {str(tool)[:80]!r}"
        raise NotFollowed("tools", f"{reason}; expected tools with an input_schema")
    function = {key: tool[key] for key in ("name", "description") if key in tool}
    return {"type": "function", "function": function | {"parameters": tool.get("input_schema")}}


def from_completion(completion: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the message that says the same as a chat completion. A call that could not be read has the input {"error": reason}."""
    [choice] = completion["choices"]
    message, usage = choice["message"], completion["usage"]
    calls = message.get("tool_calls", ())
    content: list[dict[str, Any]] = []
    if message["content"] or not calls:
        content.append({"type": "text", "text": message["content"] or ""})
    for call in calls:
        name, arguments = call["function"]["name"], _input(call["function"]["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    return {
        "id": completion["id"].replace("chatcmpl-", "msg_"),
        "type": "message",
        "role": "assistant",
        "model": completion["model"],
        "content": content,
        "stop_reason": "tool_use" if calls else "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
        },
    }


def _input(arguments: str) -> dict[str, Any]:
    try:
        read = json.loads(arguments)
    except ValueError:
        return {"error": arguments}
    return read if isinstance(read, dict) else {"error": arguments}


def streamed(message: Mapping[str, Any]) -> str:
    """Returns a message as the events of a stream, each block in one piece."""
    usage = {**message["usage"], "output_tokens": 0}
    begun = {**message, "content": [], "stop_reason": None, "usage": usage}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            opened, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            opened = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        events += [
            {"type": "content_block_start", "index": index, "content_block": opened},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    ending = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    events.append({"type": "message_delta", "delta": ending, "usage": message["usage"]})
    events.append({"type": "message_stop"})
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
