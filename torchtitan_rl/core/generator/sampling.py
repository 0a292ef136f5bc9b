"""Sampling settings, and the tokens that end a turn."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_rl.core.config import number
from torchtitan_rl.core.errors import expect

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINKING_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Tags around a policy's thinking. Mistral's and Cohere's are special tokens."""

SHOWN_TAGS = ("<answer>", "</answer>", "<|channel|>", "<|message|>", *sum(THINKING_TAGS, ()))
"""Special tokens that a completion's text keeps, because rewards read them. gpt-oss names a message's channel by two."""


def end_token_ids(folder: str | Path, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Returns the tokens that end a turn, for the engine, masks, demonstrations and conversations.

    They are those of `folder_end_token_ids`, and the one by which the chat template ends an assistant's turn, if it is
    another: the first special token after the turn's text, which for GLM-4 is the next turn's "<|user|>". If one of the
    folder's follows before the next turn, as in Command R's "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", that is the end.
    """
    named = set(folder_end_token_ids(folder, tokenizer))
    conversation = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "x7q"},
        {"role": "user", "content": "r3z"},
    ]
    closing = _special_token_ids(tokenizer, conversation[:2])
    between = _special_token_ids(tokenizer, conversation)
    ends = named if named.intersection(between) else named.union(closing[:1] or between[:1])
    return sorted(ends)


def _special_token_ids(
    tokenizer: "PreTrainedTokenizerBase", conversation: list[dict[str, str]]
) -> list[int]:
    """Returns the special tokens that the chat template writes between the assistant's text and the next user's."""
    if not tokenizer.chat_template:
        return []
    try:
        text = tokenizer.apply_chat_template(conversation, tokenize=False)
    except Exception:  # a template is a program; what it raises is named where prompts are made
        return []
    after = text.partition("x7q")[2].partition("r3z")[0]
    added = tokenizer.added_tokens_decoder
    token_ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    return [token for token in token_ids if token in added and added[token].special]


def folder_end_token_ids(folder: str | Path, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Returns the tokenizer's end token and those of generation_config.json. Without any there, those of config.json
    count, as in transformers and vLLM.

    Instruct models often have several. Example: [128001, 128008, 128009] for Llama 3.
    """
    named: list[int] = []
    for name in ("generation_config.json", "config.json"):
        file = Path(folder) / name
        entries = json.loads(file.read_text()) if file.is_file() else {}
        expect(
            isinstance(entries, dict),
            "hf_assets_path",
            str(folder),
            f"a {name} with entries",
            "Use the checkpoint's own.",
        )
        found = entries.get("eos_token_id")
        listed = found if isinstance(found, list) else [found]
        named = named or [token for token in listed if token is not None]
    ends = {*named, tokenizer.eos_token_id}
    return sorted(ends - {None})


def hidden_token_ids(tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """Returns the special tokens that a completion's text leaves out: all but SHOWN_TAGS."""
    added = tokenizer.added_tokens_decoder.items()
    return {
        token_id for token_id, token in added if token.special and token.content not in SHOWN_TAGS
    }


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
    """Tokens that end a completion, besides the end tokens of the model's folder and of the chat template."""
