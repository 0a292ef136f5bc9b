"""What to do with completions that were cut: by the length limit, or by a conversation's limits."""

from dataclasses import dataclass
from typing import Literal

from torchtitan_rl.core.config import OwnConfig, number
from torchtitan_rl.core.errors import expect
from torchtitan_rl.core.types import Completion, FinishReason


class Truncation(OwnConfig):
    """Keep truncated completions, mask them from the loss, or add DAPO's soft length penalty to the reward.

    The penalty of a completion of L tokens, with L_max the longest allowed and a cache of C tokens before it:
    0 for L <= L_max - C, else (L_max - C - L) / C, which is -1 at L_max. DAPO, arXiv 2503.14476, section 3.4.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OwnConfig.Config):
        mode: Literal["keep", "mask", "penalty"] = "keep"
        """Keep: nothing. Mask: no loss on completions that were cut; their reward stays in the baseline.
        Penalty: the soft length penalty, on every completion."""
        cut: tuple[FinishReason, ...] = ("length", "max_tokens", "max_turns", "time")
        """The finish reasons of completions that count as cut."""
        cut_reward: float = number(0.0, most=0)
        """Added to the reward of each of them, in any mode; 0 for nothing."""
        cache_tokens: int | None = number(None, above=0)
        """C, in tokens; None: a fifth of the longest completion, DAPO's share (4096 of 20480)."""

    def validate_length(self, max_completion_tokens: int) -> None:
        """Raise UserError for a cache longer than the longest completion."""
        cache = self.config.cache_tokens
        expect(
            cache is None or cache <= max_completion_tokens, "algorithm.truncation.cache_tokens", cache,
            f"at most the longest completion ({max_completion_tokens} tokens)", "Lower it or allow longer completions.",
        )  # fmt: skip

    def masks(self, completion: Completion) -> bool:
        """Whether the completion takes no part in the loss."""
        return self.config.mode == "mask" and completion.finish_reason in self.config.cut

    def cut_reward(self, completion: Completion) -> float:
        """What is added to the reward of the completion for having been cut: 0 or less."""
        return self.config.cut_reward if completion.finish_reason in self.config.cut else 0.0

    def penalty(self, num_tokens: int, max_completion_tokens: int) -> float:
        """What is added to the reward of a completion of `num_tokens` sampled tokens: in [-1, 0]."""
        if self.config.mode != "penalty":
            return 0.0
        cache = self.config.cache_tokens or max(1, max_completion_tokens // 5)
        return max(-1.0, min(0.0, (max_completion_tokens - cache - num_tokens) / cache))
