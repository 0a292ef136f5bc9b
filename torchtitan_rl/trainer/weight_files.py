"""Checks a checkpoint folder's tensors by the headers of its safetensors: each is the model's, stored once, as numbers to train."""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import safe_open

from torchtitan_rl.errors import expect
from torchtitan_rl.models.multimodal import is_text, text_name
from torchtitan_rl.trainer.model_loader import meta_model

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec

DTYPES = ("F64", "F32", "F16", "BF16")
"""The dtypes in which weights may be stored. Other dtypes are quantized and meaningless without their scales."""

LEFT_OUT = re.compile(r"rotary_emb\.inv_freq$|^mtp\.")
"""Tensors that every implementation computes from config.json, which older checkpoints store, and Qwen3.5's head for speculative
decoding."""

ROWS = 2**14
"""Rows of the embedding and of a stored tied head that are compared at a time."""

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class _Stored(NamedTuple):
    file: Path
    name: str
    dtype: str
    shape: list[int]


def check_tensors(folder: Path, spec: "ModelSpec") -> None:
    """Check that a folder's files hold the model's tensors, in their shapes, and nothing that no part of it loads.

    Raises:
        UserError: naming `hf_assets_path` and the tensors.
    """
    stored, field = _headers(folder), "hf_assets_path"
    if getattr(spec.model, "part_of", ""):
        stored = {text_name(name): places for name, places in stored.items() if is_text(name)}
    expected = spec.state_dict_adapter(spec.model, None).to_hf(meta_model(spec).state_dict())
    tied = spec.model.enable_weight_tying and {HEAD, EMBEDDING} <= stored.keys()
    unknown = [
        name
        for name in stored
        if name not in expected and not (tied and name == HEAD) and not LEFT_OUT.search(name)
    ]
    expect(
        not unknown, field, str(folder),
        f"the tensors of a {spec.name} {spec.flavor}, but its files hold {_few(unknown)}, which no part of that model loads",
        "Correct config.json (architectures, model_type, num_hidden_layers), or use the files that belong to it.",
    )  # fmt: skip
    lacking = [f"{name} is missing" for name in expected if name not in stored]
    lacking += [
        f"{name} has shape {stored[name][0].shape} instead of {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in stored and stored[name][0].shape != list(tensor.shape)
    ]
    expect(
        not lacking, field, str(folder), f"the tensors of a {spec.name} {spec.flavor}, but {_few(lacking)}",
        "Download the checkpoint again, or correct config.json.",
    )  # fmt: skip
    quantized = [
        f"{name} as {place[0].dtype}"
        for name, place in stored.items()
        if place[0].dtype not in DTYPES
    ]
    expect(
        not quantized, field, str(folder), f"weights stored as one of {DTYPES}, but its files hold {_few(quantized)}",
        "Use the checkpoint that is not quantized.",
    )  # fmt: skip
    twice = [
        f"{name} in {' and in '.join(one.file.name for one in places)}"
        for name, places in stored.items()
        if places[1:]
    ]
    expect(
        not twice,
        field,
        str(folder),
        f"each tensor once, but it has {_few(twice)}",
        "Remove the files that do not belong to it.",
    )
    expect(
        not tied or _equal(stored[EMBEDDING][0], stored[HEAD][0]), field, str(folder),
        f"tie_word_embeddings false, as {HEAD} is stored and is not {EMBEDDING}, but its config.json has true", "Correct it.",
    )  # fmt: skip


def _headers(folder: Path) -> dict[str, list[_Stored]]:
    """Returns where each tensor is stored, and as what. Files that an index does not name have only the tensors that others have too.

    transformers and vLLM read the files of an index alone; the trainer reads all, of which it takes what it knows by name.
    """
    named = _indexed(folder / "model.safetensors.index.json")
    found: dict[str, list[_Stored]] = defaultdict(list)
    files = sorted(folder.glob("*.safetensors"), key=lambda file: file.name not in named)
    for file in files:
        with open(file, "rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__" and (not named or file.name in named or name in found):
                found[name].append(_Stored(file, name, entry["dtype"], entry["shape"]))
    return found


def _indexed(index: Path) -> set[str]:
    """Returns the names of the files that hold the tensors, by the index; none without an index."""
    if not index.is_file():
        return set()
    entries = json.loads(index.read_text())
    places = entries.get("weight_map") if isinstance(entries, dict) else None
    named = set(map(str, places.values())) if isinstance(places, dict) else {"a weight_map"}
    absent = sorted(name for name in named if not (index.parent / name).is_file())
    expect(
        not absent, "hf_assets_path", str(index.parent), f"the files that its {index.name} names, but it lacks {_few(absent)}",
        "Download them, or remove the index if model.safetensors holds all.",
    )  # fmt: skip
    return named


def _equal(embedding: _Stored, head: _Stored) -> bool:
    """Whether a stored head is the embedding."""
    with safe_open(embedding.file, "pt") as one, safe_open(head.file, "pt") as other:
        parts = one.get_slice(embedding.name), other.get_slice(head.name)
        rows, same = parts[0].get_shape()[0], parts[0].get_shape() == parts[1].get_shape()
        return same and all(
            torch.equal(*(part[begin : begin + ROWS] for part in parts))
            for begin in range(0, rows, ROWS)
        )


def _few(names: list[str]) -> str:
    """Example: "a, b, c and 5 more" """
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
