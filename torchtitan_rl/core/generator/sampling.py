"""Sampling settings, and the tokens that end a turn."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_rl.core.config import number
from torchtitan_rl.core.errors import expect

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def end_token_ids(folder: str | Path, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Returns the tokens that end a turn: the tokenizer's end token and those of the folder's generation_config.json.

    Instruct models often have several. Example: [128001, 128008, 128009] for Llama 3.
    """
    file = Path(folder) / "generation_config.json"
    entries = json.loads(file.read_text()) if file.is_file() else {}
    expect(
        isinstance(entries, dict),
        "hf_assets_path",
        str(folder),
        f"a {file.name} with entries",
        "Use the checkpoint's own.",
    )
    found = entries.get("eos_token_id")
    listed = found if isinstance(found, list) else [found]
    return sorted({token for token in (tokenizer.eos_token_id, *listed) if token is not None})


@dataclass(kw_only=True, slots=True)
class SamplingConfig:
    n: int = number(8, least=0, most=65536)
    """Completions per prompt; they share its prefix cache. 0, in an evaluation: it samples nothing."""

    max_tokens: int = number(512, least=1)
    """Maximum length of a completion, in tokens. A longer one is cut and has finish_reason "length"."""

    temperature: float = number(1.0, least=0, most=2)
    """Softmax temperature; 0 is greedy, and otherwise at least 0.01, which is vLLM's least. The trainer computes its
    log-probabilities at the same temperature."""

    top_p: float = number(1.0, above=0, most=1)
    """Nucleus sampling, for evaluation only. Below 1 the sampler's distribution differs from the one that the trainer
    scores, so training refuses it."""

    top_k: int = number(0, least=0)
    """Sample from the k most likely tokens, for evaluation only; 0 keeps all tokens, as training requires."""

    stop: list[str] = field(default_factory=list)
    """Texts that end a completion, or a turn of a conversation. The text's tokens belong to the completion."""

    stop_token_ids: list[int] = number([], least=0, remedy="Use the tokenizer's ids.")
    """Tokens that end a completion, besides the end tokens of the tokenizer and generation_config.json."""
