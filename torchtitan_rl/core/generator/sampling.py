"""How completions are sampled."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_rl.core.config import number

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
    n: int = number(8, least=0, most=65536)
    """Completions for each prompt, in one request (they share the prompt's prefix cache).
    0 turns evaluation.sampled off and is an error elsewhere."""

    max_tokens: int = number(512, least=1)
    """Longest completion, in tokens; a longer one is cut and has finish_reason "length"."""

    temperature: float = number(1.0, least=0)
    """Softmax temperature; 0 is greedy. The trainer scores at the same temperature."""

    top_p: float = number(1.0, above=0, most=1)
    """Nucleus truncation, for evaluation: below 1 the sampler's distribution is no longer the one the trainer scores, so
    training refuses it."""

    top_k: int = number(0, least=0)
    """Keep the k most likely tokens, for evaluation; 0 keeps all, as training must."""

    stop: list[str] = field(default_factory=list)
    """Texts that end a completion (in a conversation: a turn); the tokens up to the text's last one belong to it."""

    stop_token_ids: list[int] = number([], least=0, remedy="Use the tokenizer's ids.")
    """Tokens that end it, besides the end tokens of tokenizer and generation_config.json."""
