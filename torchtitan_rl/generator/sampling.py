"""How completions are sampled."""

import math
from dataclasses import dataclass

from torchtitan_rl.run.errors import expect


@dataclass(kw_only=True, slots=True)
class SamplingConfig:
    n: int = 8
    """Completions for each prompt, in one request (they share the prompt's prefix cache)."""

    max_tokens: int = 512
    """Longest completion, in tokens; a longer one is cut and has finish_reason "length"."""

    temperature: float = 1.0
    """Softmax temperature; 0 is greedy. The trainer scores at the same temperature."""

    top_p: float = 1.0
    """Nucleus truncation, for evaluation: below 1 the sampler's distribution is no longer the one the trainer scores, so
    training refuses it."""

    top_k: int = 0
    """Keep the k most likely tokens, for evaluation; 0 keeps all, as training must."""

    def check(self, field: str) -> None:
        """Raise UserError for impossible values; `field` is where the config has these, such as "evaluation.sampling"."""
        greedy = self.temperature == 0
        limits = {
            "n": (self.n >= 1, "at least 1"),
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < math.inf, "0 (greedy) or more"),
            "top_p": (0 < self.top_p <= 1, "more than 0 and at most 1 (all)"),
            "top_k": (self.top_k >= 0, "0 (all) or more"),
        }
        for name, (holds, expected) in limits.items():
            expect(holds, f"{field}.{name}", getattr(self, name), expected, "Correct the value.")
        expect(
            self.n == 1 or not greedy, f"{field}.n", self.n, "1 with temperature 0, as all samples would be equal",
            f"Set {field}.temperature, or lower it.",
        )  # fmt: skip
