"""What a chat template leaves out of the messages and tools that it is given. Templates do so without an error."""

from collections.abc import Callable, Sequence
from typing import Any

Message = dict[str, Any]
"""A chat message. Example: {"role": "user", "content": "higher"}"""

Tools = list[dict[str, Any]]
"""JSON schemas of functions, in OpenAI's form."""

Render = Callable[[list[Message], Tools | None], str]
"""Renders messages and tools with a chat template."""

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields with an assistant's thinking. Each template reads its own."""

END_OF_THINKING = "</think>"


def render_chat(tokenizer: Any, messages: Sequence[Message], **options: Any) -> str:
    return tokenizer.apply_chat_template(list(messages), tokenize=False, **options)


def left_out(
    render: Render, messages: Sequence[Message], tools: Tools | None, template: str
) -> str:
    """Returns what the template does not write, in words; "" if it writes everything. It renders the messages once more.

    Contents, thinking, calls and names of tools are marked with letters, which are then looked for: a short text such as
    "a" is found in any prompt. Templates may drop the thinking of turns before the user's last message.

    Example: "the developer message"
    """
    marks = _Marks()
    roles = [message["role"] for message in messages]
    last_user = max((place for place, role in enumerate(roles) if role == "user"), default=-1)
    may_drop = [field for field in REASONING if field in template]
    marked = [
        marks.message(message, may_drop if place < last_user else ())
        for place, message in enumerate(messages)
    ]
    named = [marks.inside(tool, "the tools", only=("function", "name")) for tool in tools or ()]
    text = render(marked, named or None)
    return next((what for mark, what in marks.places.items() if mark not in text), "")


class _Marks:
    """Marks texts, and remembers what each mark stands for."""

    def __init__(self) -> None:
        self.places: dict[str, str] = {}

    def message(self, message: Message, may_drop: Sequence[str]) -> Message:
        """Returns the message with marks, but for the fields that the template may drop."""
        role = message["role"]
        marked = dict(message)
        for field in ("content", *REASONING):
            if isinstance(message.get(field), str) and field not in may_drop:
                what = f"the {role} message"
                if field != "content":
                    what = f"{field} of {what}"
                marked[field] = self._text(message[field], what)
        if message.get("tool_calls"):
            what = f"the tool_calls of the {role} message"
            marked["tool_calls"] = [
                self.inside(call, what, only=("function", "name", "arguments"))
                for call in message["tool_calls"]
            ]
        return marked

    def inside(self, value: Any, what: str, *, only: Sequence[str] = ()) -> Any:
        """Returns a JSON value with its texts and keys marked; `only`: the values of these keys, and no keys."""
        if isinstance(value, str):
            return self._text(value, what)
        if isinstance(value, list):
            return [self.inside(item, what) for item in value]
        if not isinstance(value, dict):
            return value
        if not only:
            return {self._text(key, what): self.inside(item, what) for key, item in value.items()}
        marked = dict(value)
        for key in only:
            if key in value:
                marked[key] = self.inside(value[key], what, only=only if key == "function" else ())
        return marked

    def _text(self, text: str, what: str) -> str:
        """Returns the text with a mark in the middle of what follows the thinking in it, if there is any."""
        begin = text.rfind(END_OF_THINKING)
        begin = 0 if begin < 0 else begin + len(END_OF_THINKING)
        if not text[begin:].strip():
            return text
        mark = f"zq{len(self.places)}qz"
        self.places[mark] = what
        middle = (begin + len(text)) // 2
        return text[:middle] + mark + text[middle:]
