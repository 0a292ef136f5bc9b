"""How completions are sampled."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class SamplingConfig:
    n: int = 8
    """Completions for each prompt, in one request (they share the prompt's prefix cache)."""

    max_tokens: int = 512
    """Longest completion, in tokens; a longer one is cut and has finish_reason "length"."""

    temperature: float = 1.0
    """Softmax temperature; 0 is greedy. The trainer scores at the same temperature."""

    top_p: float = 1.0
    """Nucleus truncation. Below 1 the sampler's distribution is no longer the one the trainer scores: leave it at 1 for
    training."""

    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all. The same warning as for top_p."""

    def __post_init__(self) -> None:
        limits = {
            "n": (self.n >= 1, "at least 1"),
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (self.temperature >= 0, "0 (greedy) or more"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "top_k": (self.top_k >= 0, "0 (all) or more"),
        }
        for field, (holds, expected) in limits.items():
            if not holds:
                raise ValueError(f"sampling.{field} is {getattr(self, field)}; expected {expected}.")
