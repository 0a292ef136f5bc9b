"""What answers the policy between its turns."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan_rl.core.types import FinishReason

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


def environment_reward(turn_rewards: list[list[float | None]], **_: Any) -> list[float | None]:
    """A reward function: the sum of what the environment gave in a conversation; None where it gave nothing."""
    given = [[reward for reward in rewards if reward is not None] for rewards in turn_rewards]
    return [sum(rewards) if rewards else None for rewards in given]
