"""What answers the policy between its turns."""

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan_rl.observability.rows import plain
from torchtitan_rl.types import FinishReason

Message = dict[str, Any]
"""Of a chat. Example: {"role": "user", "content": "higher"}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """An environment's answer to one message of the policy.

    Example: Turn(messages=[{"role": "user", "content": "higher"}], reward=-0.1)
    """

    messages: Sequence[Message] = ()
    """What the policy reads next; may be empty when done."""
    reward: float | None = None
    """For the turn; `environment_reward` makes these count."""
    done: bool = False
    """Whether the conversation is over."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Shown with the turn; numbers are summed over a conversation and become metrics."""


class Environment(ABC):
    """The other side of one conversation: one is made for each sample, by `Task.environment`, and is never shared.

    Each method may be a coroutine. All calls of one conversation come from one thread of its own, one after the other, so
    state needs no lock and a connection may be kept; other conversations go on meanwhile.
    """

    role: str = "user"
    """The role it answers in: what the chat template is tried with before training."""

    def reset(self) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """What is said after the prompt's messages and before the policy's first turn; the same for all samples of a prompt."""
        return ()

    @abstractmethod
    def step(self, message: Message) -> Turn | Awaitable[Turn]:
        """The answer to what the policy said: {"role": "assistant", "content": ...}."""

    def close(self, finish_reason: FinishReason) -> float | None | Awaitable[float | None]:
        """Called once at the end, unless a call before never came back: give back what is held. Returns a final reward or None."""
        return None


def checked_messages(messages: object, most_characters: int) -> tuple[Message, ...]:
    """An environment's messages. Raises TypeError or ValueError for what no chat template can take."""
    if isinstance(messages, (str, bytes, dict)) or not hasattr(messages, "__iter__"):
        raise TypeError(f"messages is {type(messages).__name__}; expected a list of messages")
    checked = tuple(messages)
    for message in checked:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise TypeError(f"a message is {str(message)[:80]!r}; expected a dict with 'role' and a text as 'content'")
        if message.get("role") not in ("user", "tool", "system"):
            raise ValueError(
                f"a message has role {message.get('role')!r}; an environment speaks as user, tool or system"
            )
        if len(message["content"]) > most_characters:
            raise ValueError(
                f"a message has {len(message['content']):,} characters; expected at most "
                f"conversations.max_answer_characters, {most_characters:,}"
            )
    return tuple(map(plain, checked))


def checked_turn(turn: object, most_characters: int) -> Turn:
    """What `step` returned. Raises TypeError or ValueError for what is no answer."""
    if not isinstance(turn, Turn):
        raise TypeError(f"step returned {type(turn).__name__}; expected a Turn")
    messages = checked_messages(turn.messages, most_characters)
    if not messages and not turn.done:
        raise ValueError("step returned no messages and is not done; the policy would have nothing to answer")
    columns = {str(name): plain(cell) for name, cell in turn.columns.items()}
    return Turn(messages=messages, reward=checked_reward(turn.reward), done=bool(turn.done), columns=columns)


def checked_reward(reward: object) -> float | None:
    """A reward as a finite float or None. Raises TypeError or ValueError for anything else."""
    if reward is None:
        return None
    number = float(reward)
    if not math.isfinite(number):
        raise ValueError(f"the reward is {number}; expected a finite number or None")
    return number


def environment_reward(turn_rewards: list[list[float | None]], **_: Any) -> list[float | None]:
    """A reward function: the sum of what the environment gave in a conversation; None where it gave nothing."""
    given = [[reward for reward in rewards if reward is not None] for rewards in turn_rewards]
    return [sum(rewards) if rewards else None for rewards in given]
