"""The interface of an environment, which answers the policy between its turns."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan_rl.data.chat_messages import Message
from torchtitan_rl.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """An environment's answer to one message of the policy.

    Example: Turn(messages=[{"role": "user", "content": "higher"}], reward=-0.1)
    """

    messages: Sequence[Message] = ()
    """Messages that the policy reads next. May be empty when done. A `Context` is a new context in place of the
    old one: it opens a trace."""
    reward: float | None = None
    """Reward of the turn. It counts in training if `environment_reward` is among the reward functions."""
    done: bool = False
    """Whether the conversation is over."""
    finish_reason: Literal["stop", "broken_call"] = "stop"
    """Why it is over, if it is."""
    trace: int | None = None
    """Index of the trace that the messages continue; None: that of the policy's message."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Values shown with the turn. Numbers are summed over the conversation and become metrics."""


class Environment(ABC):
    """The policy's partner in one conversation. `Task.environment` makes one for each sample; it is never shared.

    Each method may be a coroutine. One thread makes the environment and all its calls, one after the other, so state needs
    no lock and a connection can be kept open. Other conversations continue meanwhile.
    """

    role: str = "user"
    """Role of its messages. The chat template is tested with it before training."""
    special_tokens: bool = False
    """Whether the policy's messages keep the text of special tokens, other than the end token."""
    prompts_may_differ: bool = False
    """Whether `reset` may return other messages than for another sample of the same prompt. False: that is a failure."""
    grammar: str | None = None
    """What the policy's next message must be, as in `conversation.Answer`. Read after each call."""

    def reset(self) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Returns messages to append to the prompt before the policy's first turn. See `prompts_may_differ`."""
        return ()

    @abstractmethod
    def step(self, message: Message) -> Turn | Awaitable[Turn]:
        """Returns the answer to the policy's message {"role": "assistant", "content": ...}."""

    def close(self, finish_reason: FinishReason) -> float | None | Awaitable[float | None]:
        """Release resources; return a final reward or None. Called once at the end, unless a call never returned.

        If the run stops before the conversation has ended, the reason is "env_error".
        """
        return None


def environment_reward(turn_rewards: list[list[float | None]], **_: Any) -> list[float | None]:
    """Reward function. Returns the sum of each conversation's rewards from its environment; None if there were none."""
    numbers = [[reward for reward in rewards if reward is not None] for rewards in turn_rewards]
    return [sum(rewards) if rewards else None for rewards in numbers]
