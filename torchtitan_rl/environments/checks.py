"""Checks of the values that an environment returns."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torchtitan_rl.data.template import BREAK
from torchtitan_rl.data.turns import Message, Turn
from torchtitan_rl.text import mapped, plain
from torchtitan_rl.types import LARGEST_REWARD

ROLES = ("user", "tool", "system")
"""Roles of an environment's messages."""

_UNREADABLE = re.compile(f"[\ud800-\udfff{BREAK}]")
"""Lone surrogates, which no tokenizer accepts, and `BREAK`."""


class Context(list[Message]):
    """Messages that are the policy's whole context: of a reset instead of following the task's, or of a turn instead of
    following the conversation so far. They may have role assistant; such messages are not in the loss.

    Example: Context([{"role": "user", "content": "So far the sum is 57. Add 12."}], reason="compacted")
    """

    def __init__(
        self,
        messages: Sequence[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        parent: int | None = None,
        reason: str = "",
    ) -> None:
        """
        Args:
            tools: JSON schemas that the chat template describes to the policy. None: the task's, or the parent's.
            parent: the trace that the context comes from. None: that of the policy's last message.
            reason: how the context differs from the parent's.
        """
        super().__init__(messages)
        self.tools, self.parent, self.reason = tools, parent, reason


def escaped(text: str) -> str:
    """Returns the text with each character that cannot be tokenized as its escape. Example: the 6 characters "\\ud800"."""
    return _UNREADABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def described(error: BaseException) -> str:
    """Returns the exception's type and text. Never raises."""
    return f"{type(error).__name__}: {plain(error)}"


def checked_messages(messages: object, most_characters: int) -> Sequence[Message]:
    """Returns an environment's messages, those of a `Context` as one.

    Raises TypeError or ValueError if a chat template could not render them.
    """
    if isinstance(messages, (str, bytes, dict)) or not hasattr(messages, "__iter__"):
        raise TypeError(f"messages is {type(messages).__name__}; expected a list of messages")
    checked = tuple(messages)
    roles = (*ROLES, "assistant") if isinstance(messages, Context) else ROLES
    for message in checked:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise TypeError(
                f"a message is {str(message)[:80]!r}; expected a dict with 'role' and a string as 'content'"
            )
        if message.get("role") not in roles:
            role = message.get("role")
            raise ValueError(f"a message has role {role!r}; expected user, tool or system")
        if len(message["content"]) > most_characters:
            raise ValueError(
                f"a message has {len(message['content']):,} characters; expected at most "
                f"conversations.max_answer_characters, {most_characters:,}"
            )
    readable = tuple(mapped(plain(message), escaped) for message in checked)
    if isinstance(messages, Context):
        return Context(
            readable, tools=messages.tools, parent=messages.parent, reason=messages.reason
        )
    return readable


def checked_turn(turn: object, most_characters: int) -> Turn:
    """Returns the result of `step`. Raises TypeError or ValueError if it is not a valid Turn."""
    if not isinstance(turn, Turn):
        raise TypeError(f"step returned {type(turn).__name__}; expected a Turn")
    messages = checked_messages(turn.messages, most_characters)
    if not messages and not turn.done:
        left = "the policy would have nothing to reply to"
        raise ValueError(f"step returned no messages and is not done; {left}")
    columns = {str(name): plain(cell) for name, cell in turn.columns.items()}
    reward, done = checked_reward(turn.reward), bool(turn.done)
    return replace(turn, messages=messages, reward=reward, done=done, columns=columns)


def checked_reward(reward: object) -> float | None:
    """Returns a reward as a finite float or None. Raises TypeError or ValueError for anything else."""
    if reward is None:
        return None
    if isinstance(reward, (str, bytes)):
        raise TypeError(f"the reward is the text {reward!r}; expected a number or None")
    number = float(reward)
    if not abs(number) <= LARGEST_REWARD:
        raise ValueError(
            f"the reward is {number}; expected a number between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}, or None"
        )
    return number
