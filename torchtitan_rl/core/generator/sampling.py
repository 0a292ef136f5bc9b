"""How completions are sampled."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_rl.core.errors import expect

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def end_token_ids(folder: str | Path, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The tokens that end a turn of the policy: the tokenizer's and those of the folder's generation_config.json.

    Instruct models often have several. Example: [128001, 128008, 128009] for Llama 3.
    """
    file = Path(folder) / "generation_config.json"
    found = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    listed = found if isinstance(found, list) else [found]
    return sorted({token for token in (tokenizer.eos_token_id, *listed) if token is not None})


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

    stop: list[str] = field(default_factory=list)
    """Texts that end a completion (in a conversation: a turn); the tokens up to the text's last one belong to it."""

    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end it, besides the end tokens of tokenizer and generation_config.json."""

    def check(self, path: str) -> None:
        """Raise UserError for impossible values; `path` is where the config has these, such as "evaluation.sampling"."""
        greedy = self.temperature == 0
        limits = {
            "n": (1 <= self.n <= 65536, "at least 1 and at most 65536"),
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < math.inf, "0 (greedy) or more"),
            "top_p": (0 < self.top_p <= 1, "more than 0 and at most 1 (all)"),
            "top_k": (self.top_k >= 0, "0 (all) or more"),
            "stop": (all(isinstance(one, str) and one for one in self.stop), "texts of at least one character"),
            "stop_token_ids": (all(isinstance(one, int) and one >= 0 for one in self.stop_token_ids), "token ids"),
        }
        for name, (holds, expected) in limits.items():
            expect(holds, f"{path}.{name}", getattr(self, name), expected, "Correct the value.")
        expect(
            self.n == 1 or not greedy, f"{path}.n", self.n, "1 with temperature 0, as all samples would be equal",
            f"Set {path}.temperature, or lower it.",
        )  # fmt: skip
