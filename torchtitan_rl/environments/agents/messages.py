"""Anthropic's Messages API (`/v1/messages`) in terms of chat completions, as far as agents use it."""

import json
from collections.abc import Mapping
from typing import Any

from torchtitan_rl.environments.agents.settings import NotFollowed

_ELSEWHERE = (
    "messages",
    "system",
    "tools",
    "tool_choice",
    "output_config",
    "thinking",
    "cache_control",
    "diagnostics",
)
"""Fields that have another place or no effect."""


def as_chat(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the chat request that a Messages request stands for. Raises NotFollowed for blocks and tools of other kinds."""
    chat = {name: value for name, value in asked.items() if name not in _ELSEWHERE}
    messages: list[Any] = []
    if asked.get("system"):
        messages.append({"role": "system", "content": asked["system"]})
    given = asked.get("messages")
    for message in given if isinstance(given, list) else []:
        messages += _messages(message)
    chat["messages"] = messages if given else []
    if messages and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
        raise NotFollowed(
            "messages",
            "the agent's request begins the policy's turn for it; end with a user's message",
        )
    if asked.get("tools"):
        chat["tools"] = [_tool(tool) for tool in asked["tools"]]
    choice = asked.get("tool_choice")
    if isinstance(choice, dict):
        kinds = {"any": "required", "tool": {"type": "function", "name": choice.get("name")}}
        chat["tool_choice"] = kinds.get(str(choice.get("type")), choice.get("type"))
    output, older = asked.get("output_config"), chat.pop("output_format", None)
    chat["response_format"] = output.get("format") if isinstance(output, dict) else older
    return chat


def _messages(given: Any) -> list[Any]:
    """A message in the form of chat completions. The results of tools in it become messages of their own, before its text."""
    content = given.get("content") if isinstance(given, dict) else None
    if not isinstance(content, list):
        return [given]
    texts: list[Any] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(block)
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input"))}
            calls.append({"id": block.get("id"), "function": function})
        elif kind == "tool_result":
            results.append(
                {
                    "role": "tool",
                    "tool_call_id": block.get("tool_use_id"),
                    "content": block.get("content"),
                }
            )
        elif kind not in ("thinking", "redacted_thinking"):
            expected = "text, tool_use or tool_result"
            raise NotFollowed(
                "messages", f"the agent's request has a block of type {kind}; expected {expected}"
            )
    if given.get("role") == "assistant":
        return [{"role": "assistant", "content": texts, "tool_calls": calls}]
    return results + (
        [{"role": given.get("role"), "content": texts}] if texts or not results else []
    )


def _tool(tool: Any) -> dict[str, Any]:
    """A tool in the form of chat completions. Those that Anthropic's servers run have a type of their own."""
    if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
        raise NotFollowed(
            "tools",
            f"the agent's request has the tool {str(tool)[:80]!r}; expected tools with an input_schema",
        )
    function = {key: tool[key] for key in ("name", "description") if key in tool}
    return {"type": "function", "function": function | {"parameters": tool.get("input_schema")}}


def from_completion(completion: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the message that says the same as a chat completion. A call that could not be read has the input {"error": reason}."""
    [choice] = completion["choices"]
    said, usage = choice["message"], completion["usage"]
    content: list[dict[str, Any]] = []
    if said["content"] or not said.get("tool_calls"):
        content.append({"type": "text", "text": said["content"] or ""})
    for call in said.get("tool_calls", ()):
        function = call["function"]
        content.append(
            {
                "type": "tool_use",
                "id": call["id"],
                "name": function["name"],
                "input": _input(function["arguments"]),
            }
        )
    return {
        "id": completion["id"].replace("chatcmpl-", "msg_"),
        "type": "message",
        "role": "assistant",
        "model": completion["model"],
        "content": content,
        "stop_reason": "tool_use" if said.get("tool_calls") else "end_turn",
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
    begun = {
        **message,
        "content": [],
        "stop_reason": None,
        "usage": {**message["usage"], "output_tokens": 0},
    }
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
