"""Fields of an agent's request beside its messages: which the run decides, which are refused, which a grammar follows."""

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

_FOLLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "send several requests"),
    "tool_choice": (("auto",), "leave it to the policy with tool_choice auto"),
    "response_format": (
        ({"type": "text"},),
        "describe the format in the prompt, and read the answer in the agent",
    ),
    "logprobs": ((False,), "the run keeps them"),
    "top_logprobs": ((0,), "the run keeps them"),
    "functions": ((), "use tools"),
    "function_call": (("auto",), "use tools"),
    "previous_response_id": ((), "send the whole history in input"),
    "conversation": ((), "send the whole history in input"),
    "background": ((False,), "wait for the answer"),
    "prompt": ((), "send the messages in input"),
    "thread": ((), "send the whole conversation without it"),
    "structured_outputs": ((), "describe the form in the prompt, and read it in the agent"),
    "guided_json": ((), "describe the form in the prompt, and read it in the agent"),
    "guided_choice": ((), "describe the form in the prompt, and read it in the agent"),
    "guided_regex": ((), "use guided_json or guided_choice"),
    "guided_grammar": ((), "use guided_json or guided_choice"),
}
"""{field: (values that are followed, the remedy for others)}. An answer that does not follow them would be wrong."""

_FORMS = ("response_format", "structured_outputs", "guided_json", "guided_choice")
_WAYS = {"json", "json_object", "choice", "regex", "grammar", "structural_tag"}
"""What a turn may be asked to be in vLLM's structured_outputs."""

_SAMPLING = (
    "temperature", "top_p", "top_k", "stop", "stop_sequences", "max_tokens", "max_completion_tokens",
    "max_output_tokens", "seed", "frequency_penalty", "presence_penalty", "logit_bias",
    "min_p", "repetition_penalty",
)  # fmt: skip
"""What the run decides."""


class NotFollowed(Exception):
    """A request that the policy does not answer. The agent gets the sentence as an error, and may go on."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


def text_of(content: Any, field: str) -> str:
    """Returns the text of a content: a text, or a list of parts, among them refusals. Raises NotFollowed for other parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not all("text" in part or "refusal" in part for part in content):
        reason = f"the agent's request has the content {str(content)[:80]!r}; expected text"
        raise NotFollowed(field, reason)
    return "".join(part.get("text") or part.get("refusal") or "" for part in content)


def check_settings(request: Mapping[str, Any], *, by_grammar: bool) -> None:
    """Raises NotFollowed for a field that cannot be followed. Fields of sampling are named once in the log."""
    for name, (followed, remedy) in _FOLLOWED.items():
        value = request.get(name)
        if by_grammar and name in (*_FORMS, "tool_choice"):
            continue  # `grammar_of` follows it
        if value not in (None, [], {}) and value not in followed:
            raise _not_followed(name, value, remedy)
    names = [name for name in _SAMPLING if request.get(name) is not None]
    if names:
        log_once(f"agents asked for {', '.join(names)}: the run decides how to sample")


def grammar_of(
    request: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], make: Callable[..., str]
) -> str | None:
    """Returns the grammar of the turn that a chat request asks for; None if it may be any text.

    Raises NotFollowed if no grammar follows the request. `make` is `Grammars.of`.
    """
    choice = request.get("tool_choice") or "auto"
    forms = [name for name in _FORMS if request.get(name) not in (None, {}, {"type": "text"})]
    field = "tool_choice" if choice != "auto" or not forms else forms[0]
    form: Any = {"type": "text"}
    if forms:  # one of guided_json as structured_outputs has it
        form = request[forms[0]]
        guided = forms[0].removeprefix("guided_")
        form = {guided: form} if guided != forms[0] else form
    schema, texts = None, ()
    try:
        if len(forms) > 1 or (isinstance(form, dict) and len(form.keys() & _WAYS) > 1):
            raise ValueError("ask for one form")
        match choice, form:
            case "auto", {"type": "text"}:
                return None
            case "auto", {"type": "json_object"} | {"json_object": True}:
                schema = {"type": "object"}
            case "auto", {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
                pass
            case "auto", {"type": "json_schema", "schema": dict(schema)} | {"json": dict(schema)}:
                pass  # all but chat completions have it here
            case "auto", {"json": str(text)}:
                schema = json.loads(text)
            case "auto", {"choice": [str(), *_] as texts}:
                pass
            case "required", _:
                pass
            case (
                {"type": "function", "function": {"name": name}}
                | {"type": "function", "name": name},
                _,
            ):
                tools = [tool for tool in tools if tool["function"]["name"] == name]
            case _:
                raise ValueError(_FOLLOWED[field][1])
        if schema is None and not texts and not tools:
            raise ValueError("the request has no such tool")
        return make(schema, tools, texts=texts)
    except ValueError as error:
        raise _not_followed(field, request[field], str(error)[:400]) from None


def _not_followed(field: str, value: Any, reason: str) -> NotFollowed:
    asked = f"the agent asked for {field} {value!r:.80}"
    return NotFollowed(field, f"{asked}, which is not supported: {reason}")


@functools.cache
def log_once(text: str, level: int = logging.INFO) -> None:
    logger.log(level, text)
