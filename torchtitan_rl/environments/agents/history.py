"""An agent's history: whether a request continues one of its traces, or how it differs from it."""

import json
from collections.abc import Sequence

from torchtitan_rl.data.chat_messages import REASONING
from torchtitan_rl.data.turns import Message
from torchtitan_rl.text import head_and_tail

UNREADABLE = "unreadable"
"""Key of a tool call of the policy that could not be read. Frameworks keep such a call in forms of their own."""


def compared(history: Sequence[Message], messages: Sequence[Message]) -> tuple[int, str]:
    """Returns how many of the messages repeat `history`, and why the others do not continue it; "" if they do.

    White space at the ends of the policy's texts, the ids of calls and the form of their arguments do not count. An empty
    message of the policy may be missing, because frameworks drop it.
    """
    place = 0
    for number, before in enumerate(history, 1):
        if place < len(messages) and same(before, messages[place]):
            place += 1
        elif not is_empty(before):
            reason = "began with other messages"
            if place == len(messages):
                reason = f"left out the last {len(history) - number + 1} of {len(history)} messages"
            elif place > 0:
                became = f"{_shown(before)} became {_shown(messages[place])}"
                reason = f"changed message {number}: {became}"
            return place, reason
    if place == len(messages):
        return place, "appended no message"
    if any(message["role"] == "assistant" for message in messages[place:]):
        return place, "appended a message of role assistant, which the policy did not say"
    return place, ""


def is_empty(message: Message) -> bool:
    """Whether this is a message of the policy without a text or a call."""
    is_policys = message["role"] == "assistant"
    return is_policys and not message["content"].strip() and not message["tool_calls"]


def same(before: Message, now: Message) -> bool:
    """Whether a request repeats the message `before`."""
    if before["role"] != now["role"]:
        return False
    if before["role"] != "assistant":
        return before["content"] == now["content"]
    calls = list(now["tool_calls"])
    for i, call in enumerate(before["tool_calls"][: len(calls)]):
        if call.get(UNREADABLE):
            calls[i] = call
    return message_key(before) == message_key({**now, "tool_calls": calls})


def message_key(message: Message) -> str:
    """Returns what counts of a message of the policy, as text. Numbers are floats, as JavaScript keeps large integers."""
    calls = [(call["name"], call["arguments"]) for call in message["tool_calls"]]
    thinking = [message.get(field) for field in REASONING]
    text = json.dumps([message["content"].strip(), thinking, calls])
    return json.dumps(json.loads(text, parse_int=_number, parse_float=_number), sort_keys=True)


def _number(text: str) -> float:
    return float(text) + 0.0  # for JavaScript -0.0 is 0


def _shown(message: Message) -> str:
    return head_and_tail(json.dumps(message, ensure_ascii=False), 200)
