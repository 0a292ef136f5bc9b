"""OpenAI's chat completions as plain values: requests, their messages, and the policy's turn as a response.

Other APIs are modules with `as_chat`, `from_completion` and `streamed`, which say the same in terms of chat completions.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torchtitan_rl.data.chat_messages import REASONING
from torchtitan_rl.data.tool_calls import ToolCall
from torchtitan_rl.data.turns import Message
from torchtitan_rl.environments.agents import messages as anthropic_messages
from torchtitan_rl.environments.agents import responses
from torchtitan_rl.environments.agents.history import UNREADABLE
from torchtitan_rl.environments.agents.settings import (
    NotFollowed,
    check_settings,
    grammar_of,
    text_of,
)
from torchtitan_rl.environments.checks import described

MODEL = "policy"
"""The name of the model in responses. Requests may use any name."""


ROLES = ("system", "developer", "user", "assistant", "tool")

OTHER_APIS = {"/v1/responses": responses, "/v1/messages": anthropic_messages}
"""By address."""


class AgentError(Exception):
    """An agent's mistake, as a sentence. The conversation ends with `env_error`."""


class AgentFailed(AgentError):
    """The agent's program has ended with an error of its own."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """An agent's result of its conversation. Example: Outcome(reward=1.0, columns={"tests_passed": 12})"""

    reward: float | None = None
    columns: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any) -> "Outcome":
        """Returns the outcome that None, a number, or {"reward": ..., "columns": {...}} stands for. Raises AgentError."""
        try:
            return cls(**value) if isinstance(value, dict) else cls(value)
        except TypeError:
            raise AgentError(
                f'the agent\'s outcome is {str(value)[:80]!r}; expected {{"reward": 1.0, "columns": {{...}}}}'
            ) from None

    @classmethod
    def read(cls, text: bytes) -> "Outcome":
        """Returns the outcome in a JSON text. Raises AgentError."""
        try:
            return cls.of(_loaded(text))
        except (ValueError, RecursionError) as error:
            raise AgentError(f"the agent's outcome is not JSON: {error}") from None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request. Its messages have only the fields that count: role, content, thinking, tool_call_id, tool_calls."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    tools_by_name: dict[str, dict[str, Any]]
    stream: bool
    stream_usage: bool
    columns: dict[str, Any]
    """The agent's log of the previous turn."""

    api: ModuleType | None
    """The module of another API than chat completions."""

    grammar: str | None
    """What the policy's turn must be: see `Answer`."""

    @classmethod
    def read(cls, path: str, body: bytes, make: Callable[..., str] | None) -> "ChatRequest":
        """Reads a request for chat completions, or for the API at `path`.

        Raises NotFollowed for a request that cannot be read or followed.

        Args:
            make: `Grammars.of`; None: the request may ask for no grammar.
        """
        api = OTHER_APIS.get(path)
        try:
            request = _loaded(body)
            if api is not None:
                request = api.as_chat(request)
            check_settings(request, by_grammar=make is not None)
            if not request["messages"]:
                raise ValueError("it has no messages")
            tools = request.get("tools") or []
            by_name: dict[str, dict[str, Any]] = {}
            for tool in tools:
                by_name.setdefault(_tool_name(tool), tool)
                # One without parameters takes none; chat templates read them.
                if tool["function"].get("parameters") is None:
                    tool["function"]["parameters"] = {"type": "object", "properties": {}}
            return cls(
                messages=[_read_message(message) for message in request["messages"]],
                tools=tools,
                tools_by_name=by_name,
                stream=bool(request.get("stream")),
                stream_usage=bool((request.get("stream_options") or {}).get("include_usage")),
                columns=dict(request.get("columns") or {}),
                api=api,
                grammar=grammar_of(request, tools, make) if make else None,
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            reason = f"the agent's request cannot be read: {described(error)}"
            raise NotFollowed("body", reason) from error


def _loaded(text: bytes) -> Any:
    """Returns a JSON text's value. Raises ValueError also for numbers that are not finite and halves of characters."""
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def _tool_name(tool: Mapping[str, Any]) -> str:
    if tool.get("type", "function") != "function" or not isinstance(tool["function"]["name"], str):
        reason = f"the agent's request has the tool {str(tool)[:80]!r}; expected functions"
        raise NotFollowed("tools", reason)
    return tool["function"]["name"]


def _read_message(message: Mapping[str, Any]) -> Message:
    role, content = message["role"], text_of(message.get("content"), "messages")
    if role not in ROLES:
        reason = f"the agent's request has the role {role!r:.80}; expected one of {ROLES}"
        raise NotFollowed("messages", reason)
    if role == "tool":
        return {"role": role, "tool_call_id": str(message.get("tool_call_id")), "content": content}
    if role == "assistant":
        return {
            **{f: text_of(message[f], "messages") for f in REASONING if message.get(f)},
            "role": role,
            "content": content,
            "tool_calls": [_read_call(call) for call in message.get("tool_calls") or ()],
        }
    return {"role": "system" if role == "developer" else role, "content": content}


def _read_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")  # kept as it is if the policy wrote no JSON
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        arguments = json.loads(arguments)
    return {"id": call.get("id"), "name": function.get("name"), "arguments": arguments}


def policy_message(turn: int, spoken: str, calls: Sequence[ToolCall]) -> Message:
    """Returns a turn of the policy as OpenAI's message.

    A call that could not be read has the reason as its arguments, which no client can read as JSON.
    """
    if not calls:
        return {"role": "assistant", "content": spoken}
    before = spoken.partition("<tool_call>")[0].strip() if "<tool_call>" in spoken else ""
    listed = []
    for i, call in enumerate(calls):
        arguments = call.error or json.dumps(call.arguments, ensure_ascii=False)
        function = {"name": call.name or "unknown", "arguments": arguments}
        listed.append({"id": f"call_{turn}_{i}", "type": "function", "function": function})
    return {"role": "assistant", "content": before or None, "tool_calls": listed}


def heard(message: Message, calls: Sequence[ToolCall]) -> Message:
    """Returns the policy's message as a later request repeats it. Calls that could not be read are marked."""
    read = _read_message(message)
    for listed, call in zip(read["tool_calls"], calls, strict=True):
        if call.error is not None:
            listed[UNREADABLE] = True
    return read


def answer_to(
    request: ChatRequest, turn: int, message: Message, *, prompt: int, sampled: int
) -> tuple[str, str]:
    """Returns the body of the answer to a request, and its media type. `prompt` and `sampled` are numbers of tokens."""
    reason = "tool_calls" if "tool_calls" in message else "stop"
    usage = {"prompt_tokens": prompt, "completion_tokens": sampled}
    answer = {
        "id": f"chatcmpl-{turn}",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason}],
        "usage": {**usage, "total_tokens": prompt + sampled},
    }
    events = functools.partial(streamed, with_usage=request.stream_usage)
    if request.api is not None:
        answer, events = request.api.from_completion(answer), request.api.streamed
    if request.stream:
        return events(answer), "text/event-stream"
    return json.dumps(answer), "application/json"


def streamed(response: Mapping[str, Any], *, with_usage: bool) -> str:
    """Returns a response as the events of a stream: the text, each call, the finish reason, and the usage if it is asked for."""
    [choice] = response["choices"]
    text = {field: choice["message"][field] for field in ("role", "content")}
    calls = enumerate(choice["message"].get("tool_calls", ()))
    deltas = [text, *({"tool_calls": [{"index": i, **call}]} for i, call in calls)]
    head = {key: response[key] for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]})
    chunks = [{**head, "choices": [each]} for each in choices]
    if with_usage:
        chunks.append({**head, "choices": [], "usage": response["usage"]})
    return "".join(f"data: {text}\n\n" for text in [*map(json.dumps, chunks), "[DONE]"])
