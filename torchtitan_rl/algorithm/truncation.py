"""The treatment of completions that were cut by the length limit or by a conversation's limits."""

from dataclasses import dataclass
from typing import Literal

from torchtitan_rl.fields.number import number
from torchtitan_rl.fields.own_config import OwnConfig
from torchtitan_rl.types import Completion, FinishReason


class Truncation(OwnConfig):
    """Keeps truncated completions, masks them from the loss, or adds DAPO's soft length penalty to the reward.

    For a completion of L tokens, with at most L_max allowed, the penalty sets in C tokens before the limit: 0 for
    L <= L_max - C, else (L_max - C - L) / C, which is -1 at L_max. DAPO, arXiv 2503.14476, section 3.4.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OwnConfig.Config):
        mode: Literal["keep", "mask", "penalty"] = "keep"
        """Keep: no change. Mask: completions that were cut have no loss; their reward stays in the baseline.
        Penalty: the soft length penalty, on every completion."""
        cut: tuple[FinishReason, ...] = ("length", "max_tokens", "max_turns", "max_traces", "time")
        """The finish reasons that count as cut; "stop" is none."""
        cut_reward: float = number(0.0, most=0)
        """Added to the reward of completions that were cut, in every mode."""
        cache_tokens: int | None = number(None, above=0)
        """C in tokens; None: a fifth of the longest completion, as in DAPO (4096 of 20480). At most the longest of
        the prompt."""

    def masks(self, completion: Completion) -> bool:
        return self.config.mode == "mask" and completion.finish_reason in self.config.cut

    def cut_reward(self, completion: Completion) -> float:
        """The change of the reward if the completion was cut: 0 or less."""
        return self.config.cut_reward if completion.finish_reason in self.config.cut else 0.0

    def penalty(self, num_tokens: int, max_completion_tokens: int) -> float:
        """The soft length penalty of a completion with `num_tokens` sampled tokens, in [-1, 0]."""
        if self.config.mode != "penalty":
            return 0.0
        cache = self.config.cache_tokens or max(1, max_completion_tokens // 5)
        cache = min(cache, max_completion_tokens)
        return max(-1.0, min(0.0, (max_completion_tokens - cache - num_tokens) / cache))
