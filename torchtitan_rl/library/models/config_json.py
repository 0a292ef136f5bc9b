"""Reads a checkpoint folder's config.json with transformers, after a check of values that transformers itself takes on trust."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_rl.core.errors import UserError, expect

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_COUNTS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "max_position_embeddings",
)  # fmt: skip
"""Entries that are whole numbers of at least 1."""

_EXPERT_COUNTS = (
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "decoder_sparse_step",
)
"""The same in a Qwen3-MoE. Dense models may have them as 0."""

_NUMBERS = ("rope_theta", "factor", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor")
_NUMBERS += ("original_max_position_embeddings", "partial_rotary_factor", "rms_norm_eps", "layer_norm_eps")
"""Entries that are numbers above 0, at the top or among RoPE's."""


def read_config(folder: Path) -> "PretrainedConfig":
    """Reads config.json with transformers, which fills in missing entries of an older or shorter file.

    Raises:
        UserError: naming `hf_assets_path` and the entry, if it cannot be read or an entry cannot be computed with.
    """
    from transformers import AutoConfig

    field = f"hf_assets_path = {str(folder)!r}"
    try:
        entries = json.loads((folder / "config.json").read_text())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{field}: config.json is not valid JSON: {error}. Download the checkpoint again.") from error
    wrong = [*_wrong_architectures(entries), *wrong_values(entries)] if isinstance(entries, dict) else ["no entries"]
    expect(
        not wrong, "hf_assets_path", str(folder), f"the config.json of a decoder, but it has {'; '.join(wrong)}", "Correct it."
    )  # fmt: skip
    try:
        read = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # many types, for unknown model types and for wrong types of values
        said = " ".join(str(error).strip().split("\n\n")[0].split()) or type(error).__name__
        raise UserError(
            f"{field}: transformers cannot read its config.json: {said.rstrip('.')}. Correct it."
        ) from error
    for fault in _wrong_heads(read.to_dict()):
        raise UserError(f"{field}: its config.json has, or leaves to transformers' default, {fault}. Correct it.")
    return read


def _wrong_architectures(entries: dict[str, Any]) -> Iterator[str]:
    """Yields the entry `architectures` if it names no class."""
    names = entries.get("architectures")
    if not (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
        yield f"architectures {names!r}, which must be a list with the model's class, such as ['Qwen3ForCausalLM']"


def wrong_values(entries: dict[str, Any]) -> Iterator[str]:
    """Yields each entry of a config.json that no decoder can have. A null is transformers' default."""
    is_mixture = entries.get("model_type") == "qwen3_moe"
    for key in _COUNTS + (_EXPERT_COUNTS if is_mixture else ()):
        value = entries.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            yield f"{key} {value!r}, which must be a whole number of at least 1"
            return
    yield from _wrong_heads(entries)
    experts = entries.get("num_experts") or entries.get("num_local_experts")
    chosen = entries.get("num_experts_per_tok")
    if is_mixture and experts and chosen and chosen > experts:
        yield f"num_experts_per_tok {chosen}, which is more than num_experts {experts}"
    for part in _with_rope(entries):
        for key in _NUMBERS:
            value = part.get(key)
            may_be_null = part is entries or key not in part
            if not (value is None and may_be_null or _is_positive(value)):
                yield f"{key} {value!r}, which must be a number above 0"


def _wrong_heads(entries: dict[str, Any]) -> Iterator[str]:
    """Yields the number of key and value heads if it does not divide the heads."""
    heads, kv_heads = entries.get("num_attention_heads"), entries.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        yield f"num_key_value_heads {kv_heads}, which does not divide num_attention_heads {heads}"


def _with_rope(entries: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the entries and RoPE's among them: one dict, or one for each type of layer."""
    yield entries
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(found := entries.get(key), dict):
            yield found
            yield from (part for part in found.values() if isinstance(part, dict))


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
