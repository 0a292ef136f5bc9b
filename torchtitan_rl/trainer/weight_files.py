"""Checks a checkpoint folder's tensors by the headers of its safetensors: each is the model's, stored once, as numbers to train."""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from torchtitan_rl.errors import expect
from torchtitan_rl.models.multimodal import is_text, opened, text_name
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
    """Check that a folder's files hold the model's tensors, each once, in their shapes, and nothing that no part of it loads.

    Raises:
        UserError: naming `hf_assets_path` and the file or the tensors.
    """
    stored = _headers(folder)
    if getattr(spec.model, "part_of", ""):
        stored = {text_name(name): places for name, places in stored.items() if is_text(name)}
    expected = spec.state_dict_adapter(spec.model, None).to_hf(meta_model(spec).state_dict())
    tied = spec.model.enable_weight_tying and {HEAD, EMBEDDING} <= stored.keys()
    problems = [f"{name} is missing" for name in expected if name not in stored]
    for name, places in stored.items():
        place, *others = places
        if name in expected and place.shape != list(expected[name].shape):
            problems.append(
                f"{name} has shape {place.shape} instead of {list(expected[name].shape)}"
            )
        if name not in expected and not (tied and name == HEAD) and not LEFT_OUT.search(name):
            problems.append(f"{name} is loaded by no part of that model")
        if place.dtype not in DTYPES:
            problems.append(f"{name} is quantized to {place.dtype}")
        if others:
            files = " and in ".join(other.file.name for other in places)
            problems.append(f"{name} is in {files}")
    if tied and not problems and not _equal(stored[EMBEDDING][0], stored[HEAD][0]):
        problems.append(
            f"{HEAD} is not {EMBEDDING}, although config.json has tie_word_embeddings true"
        )
    more = f" and {len(problems) - 3} more" if problems[3:] else ""
    expect(
        not problems, "hf_assets_path", str(folder),
        f"the tensors of a {spec.name} {spec.flavor}, each once, but {', '.join(problems[:3])}{more}",
        "Download the checkpoint again, correct its config.json, or remove the files that do not belong to it.",
    )  # fmt: skip


def _headers(folder: Path) -> dict[str, list[_Stored]]:
    """Returns where each tensor is stored, and as what. Files that an index does not name have only the tensors that others have too.

    transformers and vLLM read the files of an index alone; the trainer reads all, of which it takes what it knows by name.
    """
    named = _indexed(folder / "model.safetensors.index.json")
    stored: dict[str, list[_Stored]] = defaultdict(list)
    for file in sorted(folder.glob("*.safetensors"), key=lambda file: file.name not in named):
        with opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118  (a handle, not a dict)
                if not named or file.name in named or name in stored:
                    entry = tensors.get_slice(name)
                    place = _Stored(file, name, entry.get_dtype(), entry.get_shape())
                    stored[name].append(place)
    return stored


def _indexed(index: Path) -> set[str]:
    """Returns the names of the files that hold the tensors, by the index; none without an index."""
    if not index.is_file():
        return set()
    try:
        named = set(map(str, json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):  # cut off, or another file
        named = {"a weight_map"}
    absent = sorted(name for name in named if not (index.parent / name).is_file())
    expect(
        not absent, "hf_assets_path", str(index.parent),
        f"the files that its {index.name} names, but it lacks {', '.join(absent[:3])}",
        "Download them, or remove the index if model.safetensors holds all.",
    )  # fmt: skip
    return named


def _equal(embedding: _Stored, head: _Stored) -> bool:
    """Whether a stored head is the embedding."""
    with opened(embedding.file) as first, opened(head.file) as second:
        parts = first.get_slice(embedding.name), second.get_slice(head.name)
        return embedding.shape == head.shape and all(
            torch.equal(*(part[begin : begin + ROWS] for part in parts))
            for begin in range(0, embedding.shape[0], ROWS)
        )
