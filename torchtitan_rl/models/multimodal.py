"""The text of multimodal checkpoints: its `text_config` is the policy, and all other parts stay as they are.

Stored names have a part `language_model.` that the text's own model has not: `model.language_model.layers.0.mlp.up_proj.weight`, or
in older files `language_model.model.layers.0.mlp.up_proj.weight`, is its `model.layers.0.mlp.up_proj.weight`.
"""

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader

from torchtitan_rl.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MULTIMODAL = (
    "Qwen3_5ForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
)
"""`architectures` of multimodal checkpoints whose text is trained."""

PART, HEAD = "language_model.", "lm_head.weight"


def text_of(found: "PretrainedConfig", folder: Path) -> "PretrainedConfig":
    """Returns the text's config of a multimodal one, with the architecture of the text's own model.

    Mistral Small 3.1's config.json does not say that its head is tied, and transformers' defaults contradict each other: of two, a
    stored head decides.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    text = found.text_config
    text.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(text)].__name__]
    has_head = any(name.endswith(HEAD) for name, _ in stored_tensors(folder))
    is_tied = text.tie_word_embeddings or not has_head
    text.tie_word_embeddings = found.tie_word_embeddings and is_tied
    if quantization := getattr(found, "quantization_config", None):
        text.quantization_config = quantization
    return text


def text_name(stored: str) -> str:
    """Returns a stored tensor's name in the text's own model. Example: "language_model.lm_head.weight" -> "lm_head.weight" """
    return stored.replace(PART, "", 1)


def is_text(stored: str) -> bool:
    """Whether a tensor of a multimodal checkpoint is the text's."""
    return PART in stored or stored == HEAD


class TextReader(HuggingFaceStorageReader):
    """Reads a folder's safetensors by the names of the text's own model."""

    def read_metadata(self) -> Any:
        metadata = super().read_metadata()
        stored = metadata.state_dict_metadata
        self._stored = {text_name(name): name for name in stored}
        metadata.state_dict_metadata = {ours: stored[name] for ours, name in self._stored.items()}
        return metadata

    def read_data(self, plan: Any, planner: Any) -> Any:
        items = []
        for item in plan.items:
            index = replace(item.storage_index, fqn=self._stored[item.storage_index.fqn])
            items.append(replace(item, storage_index=index))
        return super().read_data(replace(plan, items=items), planner)


def whole_weights(
    weights: Iterable[tuple[str, Tensor]], start: Path
) -> Iterator[tuple[str, Tensor]]:
    """Yields the text's weights under the names that they have in the starting folder, and then its other tensors, unchanged."""
    stored = {text_name(name): name for name, _ in stored_tensors(start) if is_text(name)}
    yield from ((stored[name], tensor) for name, tensor in weights if name in stored)
    yield from ((name, read()) for name, read in stored_tensors(start) if not is_text(name))


def stored_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yields (name, function that reads it) for each tensor of a folder's files. Raises UserError as `opened`."""
    for file in sorted(folder.glob("*.safetensors")):
        with opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118  (a handle, not a dict)
                yield name, lambda name=name, tensors=tensors: tensors.get_tensor(name)


def opened(file: Path) -> safe_open:
    """Returns the tensors of a checkpoint's file. Raises UserError, naming `hf_assets_path`, if it cannot be read."""
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"hf_assets_path = {str(file.parent)!r}: its {file.name} cannot be read: {error}. It may have been cut off, or be a pointer "
            "of Git LFS (git lfs pull) or a web page in the file's place: download it again."
        ) from error


@contextmanager
def engine_folder(folder: str, text: "PretrainedConfig | None") -> Iterator[str]:
    """Within the context, a folder with the text's own config.json, from which an engine of the text alone is made.

    `text`: the config of a multimodal checkpoint's text. None: `folder` is returned itself.
    """
    if text is None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as made:
        for file in Path(folder).resolve().glob("*.json"):
            if file.name != "config.json":
                Path(made, file.name).symlink_to(file)
        entries = text.to_dict() | {"architectures": text.architectures}
        Path(made, "config.json").write_text(json.dumps(entries, default=str))
        yield made
