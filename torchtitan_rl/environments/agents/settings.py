"""Fields of an agent's request beside its messages: which have no effect, which the run decides, which are refused."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchtitan_rl.sampling import SamplingConfig

logger = logging.getLogger(__name__)

_WITHOUT_EFFECT = {
    "model",
    "messages",
    "tools",
    "columns",
    "stream",
    "stream_options",
    "user",
    "metadata",
    "store",
}
_WITHOUT_EFFECT |= {
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "service_tier",
    "include",
}
_WITHOUT_EFFECT |= {
    "parallel_tool_calls",
    "modalities",
    "truncation",
    "verbosity",
    "reasoning_effort",
    "reasoning",
}
"""Fields that do not change what is sampled here."""

_FOLLOWED = {"n": (1,), "tool_choice": ("auto",), "logprobs": (False,), "top_logprobs": (0,)}
_FOLLOWED |= {
    "response_format": ({"type": "text"},),
    "functions": ((),),
    "function_call": ("auto",),
}
_FOLLOWED |= {"previous_response_id": (), "conversation": (), "background": (False,), "prompt": ()}
"""The values of fields that are refused otherwise, because an answer that does not follow them would be wrong."""

BY_GRAMMAR = ("response_format", "tool_choice")
"""What `grammar_of` follows, where the engine records the tokens that it kept."""

_REMEDIES = {
    "n": "send several requests",
    "tool_choice": "leave it to the policy with tool_choice auto",
    "response_format": "describe the format in the prompt, and read the answer in the agent",
    "logprobs": "the run keeps them",
    "top_logprobs": "the run keeps them",
    "functions": "use tools",
    "function_call": "use tools",
    "previous_response_id": "send the whole history in input",
    "conversation": "send the whole history in input",
    "background": "wait for the answer",
    "prompt": "send the messages in input",
}


class NotFollowed(Exception):
    """A request that the policy does not answer. The agent gets the sentence as an error, and may go on."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


def check_settings(asked: Mapping[str, Any], sampling: SamplingConfig) -> None:
    """Raises NotFollowed for a field that cannot be followed. Others that the run does not follow are named once in the log."""
    ignored: dict[str, Any] = {}
    for name, value in asked.items():
        if name in _WITHOUT_EFFECT or value is None or value == [] or value == {}:
            continue
        if name in _FOLLOWED:
            if value not in _FOLLOWED[name]:
                raise NotFollowed(
                    name,
                    f"the agent asked for {name} {_shown(value)}, which is not supported: {_REMEDIES[name]}",
                )
        elif value != getattr(sampling, name, None):
            ignored[name] = value
    _note(ignored)


def grammar_of(
    asked: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], make: Callable[..., str]
) -> str | None:
    """Returns the grammar of the turn that a chat request asks for; None if it may be any text.

    Raises NotFollowed if no grammar follows the request. `make` is `Grammars.of`.
    """
    choice, wanted = (
        asked.get("tool_choice") or "auto",
        asked.get("response_format") or {"type": "text"},
    )
    field, schema = "response_format" if choice == "auto" else "tool_choice", None
    try:
        match choice, wanted:
            case "auto", {"type": "text"}:
                return None
            case "auto", {"type": "json_object"}:
                schema = {"type": "object"}
            case "auto", {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
                pass
            case "auto", {
                "type": "json_schema",
                "schema": dict(schema),
            }:  # all but chat completions have it here
                pass
            case "required", _:
                pass
            case {"type": "function", "function": {"name": name}} | {
                "type": "function",
                "name": name,
            }, _:
                tools = [tool for tool in tools if tool["function"]["name"] == name]
            case _:
                raise ValueError(_REMEDIES[field])
        if schema is None and not tools:
            raise ValueError("the request has no such tool")
        return make(schema, tools)
    except ValueError as error:
        reason = f"the agent asked for {field} {_shown(asked[field])}, which is not supported: {str(error)[:400]}"
        raise NotFollowed(field, reason) from None


def _shown(value: Any) -> str:
    return repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:80]}..."


_noted: set[str] = set()
_lock = threading.Lock()


def _note(ignored: Mapping[str, Any]) -> None:
    """Logs the names that this process has not logged yet."""
    with _lock:
        new = ignored.keys() - _noted
        _noted.update(new)
    if new:
        named = ", ".join(f"{name} {_shown(ignored[name])}" for name in sorted(new))
        logger.info(
            f"agents asked for {named}: not followed, because the run decides how to sample"
        )
