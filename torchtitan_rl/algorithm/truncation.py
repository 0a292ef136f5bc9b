"""What to do with completions that hit the length limit."""

from dataclasses import dataclass
from typing import Literal

from torchtitan.config import Configurable

from torchtitan_rl.run.errors import expect
from torchtitan_rl.types import Completion


class Truncation(Configurable):
    """Keep truncated completions, mask them from the loss, or add DAPO's soft length penalty to the reward.

    The penalty of a completion of L tokens, with L_max the longest allowed and a cache of C tokens before it:
    0 for L <= L_max - C, else (L_max - C - L) / C, which is -1 at L_max. DAPO, arXiv 2503.14476, section 3.4.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        mode: Literal["keep", "mask", "penalty"] = "keep"
        """Keep: nothing. Mask: no loss on completions with finish_reason "length"; their reward stays in the baseline.
        Penalty: the soft length penalty, on every completion."""
        cache_tokens: int | None = None
        """C, in tokens; None: a fifth of the longest completion, DAPO's share (4096 of 20480)."""

        def __post_init__(self) -> None:
            expect(
                self.cache_tokens is None or self.cache_tokens > 0,
                "algorithm.truncation.cache_tokens", self.cache_tokens, "None or a number > 0", "Use None.",
            )  # fmt: skip

    def __init__(self, config: Config) -> None:
        self.mode = config.mode
        self.cache_tokens = config.cache_tokens

    def masks(self, completion: Completion) -> bool:
        """Whether the completion takes no part in the loss."""
        return self.mode == "mask" and completion.finish_reason == "length"

    def penalty(self, num_tokens: int, max_completion_tokens: int) -> float:
        """What is added to the reward of a completion of `num_tokens` sampled tokens: in [-1, 0].

        Raises:
            UserError: the cache is longer than the longest completion.
        """
        if self.mode != "penalty":
            return 0.0
        cache = self.cache_tokens or max(1, max_completion_tokens // 5)
        expect(
            cache <= max_completion_tokens, "algorithm.truncation.cache_tokens", cache,
            f"at most the longest completion ({max_completion_tokens} tokens)", "Lower it or allow longer completions.",
        )  # fmt: skip
        return max(-1.0, min(0.0, (max_completion_tokens - cache - num_tokens) / cache))
