"""The tokens that end a turn, and those that a completion's text leaves out."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_rl.data.chat_messages import render_chat
from torchtitan_rl.errors import expect
from torchtitan_rl.fields.references import correctable

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
        text = render_chat(tokenizer, conversation)
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
        with correctable(f"hf_assets_path = {str(folder)!r}: {name} is not JSON:"):
            entries = json.loads(file.read_text()) if file.is_file() else {}
        eos = entries.get("eos_token_id")
        listed = eos if isinstance(eos, list) else [eos]
        are_ids = all(token is None or isinstance(token, int) for token in listed)
        expected = f"a token id or a list of them as eos_token_id, but its {name} has {eos!r:.200}"
        expect(are_ids, "hf_assets_path", str(folder), expected, "Correct it.")
        named = named or [token for token in listed if token is not None]
    ends = {*named, tokenizer.eos_token_id}
    return sorted(ends - {None})


def hidden_token_ids(tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """Returns the special tokens that a completion's text leaves out: all but SHOWN_TAGS."""
    added = tokenizer.added_tokens_decoder.items()
    return {i for i, token in added if token.special and token.content not in SHOWN_TAGS}
