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
from torchtitan_rl.environments.agents.settings import BY_GRAMMAR, check_settings, grammar_of
from torchtitan_rl.sampling import SamplingConfig

MODEL = "policy"
"""The name of the model in responses. Requests may use any name."""


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
        found = {"reward": value} if value is None or isinstance(value, int | float) else value
        if not isinstance(found, dict) or not found.keys() <= {"reward", "columns"}:
            raise AgentError(
                f'the agent\'s outcome is {str(value)[:80]!r}; expected {{"reward": 1.0, "columns": {{...}}}}'
            )
        reward, columns = found.get("reward"), found.get("columns", {})
        if not isinstance(reward, int | float | None) or not isinstance(columns, dict):
            raise AgentError(
                f"the agent's outcome is {str(value)[:80]!r}; expected a number and a dict of columns"
            )
        return cls(reward, columns)

    @classmethod
    def read(cls, text: bytes) -> "Outcome":
        """Returns the outcome in a JSON text. Raises AgentError."""
        try:
            return cls.of(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise AgentError(f"the agent's outcome is not JSON: {error}") from None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request. Its messages have only the fields that count: role, content, thinking, tool_call_id, tool_calls."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    stream: bool
    stream_usage: bool
    columns: dict[str, Any]
    """The agent's log of the previous turn."""

    api: ModuleType | None = None
    """The module of another API than chat completions."""

    grammar: str | None = None
    """What the policy's turn must be: see `Answer`."""

    @classmethod
    def read(
        cls,
        body: bytes,
        sampling: SamplingConfig,
        make: Callable[..., str] | None = None,
        *,
        path="",
    ) -> "ChatRequest":
        """Reads a request for chat completions, or for the API at `path`. Without `make`, `Grammars.of`, it may ask for none.

        Raises AgentError for a malformed request, and NotFollowed for one whose settings cannot be followed.
        """
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise AgentError(f"the agent's request is not JSON: {error}") from None
        api = OTHER_APIS.get(path)
        if api is not None and isinstance(asked, dict):
            asked = api.as_chat(asked)
        messages = asked.get("messages") if isinstance(asked, dict) else None
        if not isinstance(messages, list) or not messages:
            raise AgentError("the agent's request has no messages")
        others = {
            name: value for name, value in asked.items() if make is None or name not in BY_GRAMMAR
        }
        check_settings(others, sampling)
        tools, options = asked.get("tools") or [], asked.get("stream_options")
        if not isinstance(tools, list) or not all(
            isinstance(tool, dict) and _name(tool) for tool in tools
        ):
            raise AgentError(
                "the agent's tools are malformed; expected a list of functions with names"
            )
        columns = asked.get("columns") or {}
        if not isinstance(columns, dict):
            raise AgentError(
                f"the agent's request has the columns {str(columns)[:80]!r}; expected a dict"
            )
        stream_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        read = [_read_message(message) for message in messages]
        grammar = grammar_of(asked, tools, make) if make else None
        return cls(read, tools, bool(asked.get("stream")), stream_usage, columns, api, grammar)

    @property
    def tool_names(self) -> list[str]:
        """Names of the tools."""
        return [_name(tool) for tool in self.tools]


def _name(tool: Mapping[str, Any]) -> str | None:
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None


def _read_message(given: Any) -> Message:
    role = given.get("role") if isinstance(given, dict) else None
    if role in ("system", "developer", "user"):
        return {
            "role": "user" if role == "user" else "system",
            "content": _text(given.get("content")),
        }
    if role == "tool":
        return {
            "role": role,
            "tool_call_id": str(given.get("tool_call_id")),
            "content": _text(given.get("content")),
        }
    if role == "assistant":
        calls = given.get("tool_calls") or []
        if not isinstance(calls, list):
            raise AgentError("the agent's request has tool_calls that are no list")
        return {
            **{field: _text(given[field]) for field in REASONING if given.get(field)},
            "role": role,
            "content": _text(given.get("content")),
            "tool_calls": [_read_call(call) for call in calls],
        }
    raise AgentError(
        f"the agent's request has the message {str(given)[:80]!r}; expected one of role system, user, assistant or tool"
    )


def _text(content: Any) -> str:
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise AgentError(
            f"the agent's request has the content {str(content)[:80]!r}; expected text"
        )
    return content or ""


def _read_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise AgentError(
            f"the agent's request has the tool call {str(call)[:80]!r}; expected one with a function"
        )
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
    functions = [
        {
            "name": call.name or "unknown",
            "arguments": call.error or json.dumps(call.arguments, ensure_ascii=False),
        }
        for call in calls
    ]
    listed = [
        {"id": f"call_{turn}_{i}", "type": "function", "function": one}
        for i, one in enumerate(functions)
    ]
    return {"role": "assistant", "content": before or None, "tool_calls": listed}


def heard(message: Message, calls: Sequence[ToolCall] = ()) -> Message:
    """Returns the policy's message as a later request repeats it. Calls that could not be read are marked."""
    read = _read_message(message)
    for listed, call in zip(read["tool_calls"], calls, strict=True):
        if call.error is not None:
            listed[UNREADABLE] = True
    return read


def body_of(request: ChatRequest, completion: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the answer to a request, and its media type."""
    if request.api is not None:
        answer, events = request.api.from_completion(completion), request.api.streamed
    else:
        answer, events = completion, functools.partial(streamed, with_usage=request.stream_usage)
    if request.stream:
        return events(answer), "text/event-stream"
    return json.dumps(answer), "application/json"


def completion(
    turn: int, message: Message, *, prompt_tokens: int, completion_tokens: int
) -> dict[str, Any]:
    """Returns the response to a request."""
    reason = "tool_calls" if "tool_calls" in message else "stop"
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return {
        "id": f"chatcmpl-{turn}",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason}],
        "usage": {**usage, "total_tokens": prompt_tokens + completion_tokens},
    }


def streamed(response: Mapping[str, Any], *, with_usage: bool) -> str:
    """Returns a response as the events of a stream: the message, the finish reason, and the usage if it is asked for."""
    [choice] = response["choices"]
    calls = [{"index": i, **call} for i, call in enumerate(choice["message"].get("tool_calls", ()))]
    delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    head = {key: response[key] for key in ("id", "created", "model")} | {
        "object": "chat.completion.chunk"
    }
    chunks: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
    ]
    if with_usage:
        chunks.append({**head, "choices": [], "usage": response["usage"]})
    return "".join(f"data: {text}\n\n" for text in [*map(json.dumps, chunks), "[DONE]"])
