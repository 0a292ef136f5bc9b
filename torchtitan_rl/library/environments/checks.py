"""Checks of the values that an environment returns."""

import math

from torchtitan_rl.core.generator.environment import Message, Turn
from torchtitan_rl.core.text import plain


def checked_messages(messages: object, most_characters: int) -> tuple[Message, ...]:
    """Returns an environment's messages. Raises TypeError or ValueError if a chat template could not render them."""
    if isinstance(messages, (str, bytes, dict)) or not hasattr(messages, "__iter__"):
        raise TypeError(f"messages is {type(messages).__name__}; expected a list of messages")
    checked = tuple(messages)
    for message in checked:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise TypeError(
                f"a message is {str(message)[:80]!r}; expected a dict with 'role' and a string as 'content'"
            )
        if message.get("role") not in ("user", "tool", "system"):
            raise ValueError(f"a message has role {message.get('role')!r}; expected user, tool or system")
        if len(message["content"]) > most_characters:
            raise ValueError(
                f"a message has {len(message['content']):,} characters; expected at most "
                f"conversations.max_answer_characters, {most_characters:,}"
            )
    return tuple(map(plain, checked))


def checked_turn(turn: object, most_characters: int) -> Turn:
    """Returns the result of `step`. Raises TypeError or ValueError if it is not a valid Turn."""
    if not isinstance(turn, Turn):
        raise TypeError(f"step returned {type(turn).__name__}; expected a Turn")
    messages = checked_messages(turn.messages, most_characters)
    if not messages and not turn.done:
        raise ValueError("step returned no messages and is not done; the policy would have nothing to reply to")
    columns = {str(name): plain(cell) for name, cell in turn.columns.items()}
    return Turn(messages=messages, reward=checked_reward(turn.reward), done=bool(turn.done), columns=columns)


def checked_reward(reward: object) -> float | None:
    """Returns a reward as a finite float or None. Raises TypeError or ValueError for anything else."""
    if reward is None:
        return None
    number = float(reward)
    if not math.isfinite(number):
        raise ValueError(f"the reward is {number}; expected a finite number or None")
    return number
