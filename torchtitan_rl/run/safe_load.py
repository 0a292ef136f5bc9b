"""Loading of DCP checkpoints that cannot execute code.

torch unpickles `.metadata` and all values that are not tensors, so a foreign checkpoint could run code. Here the index may only
name DCP's own record types, and values are read with weights_only.
"""

import io
import pickle
import warnings
from collections.abc import Iterator, Mapping
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from torchtitan_rl.models.hf import blocks_of, to_hf

_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device", *(str(d).removeprefix("torch.") for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool))},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath"},
}  # fmt: skip
"""Names that a checkpoint's index may contain, by module."""


def _member(kind: object, name: str) -> Enum:
    """Returns the member of an Enum with this name. Early releases of Python 3.11 pickle a member as getattr(Enum, name)."""
    if not isinstance(kind, EnumMeta):
        asked = f"the attribute {name} of {kind!r}"
        raise pickle.UnpicklingError(f"the index asks for {asked}, which is no Enum")
    return kind[name]


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _RECORDS.get(module, ()):
            named = f"the index names {module}.{name}"
            raise pickle.UnpicklingError(f"{named}, which no checkpoint of this program contains")
        return super().find_class(module, name)


class SafeReader(dcp.FileSystemReader):
    """Reads a checkpoint folder. Its `.metadata` may only contain DCP's records.

    Raises: pickle.UnpicklingError for any other object, before it is created.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _IndexUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """torch's planner, which here reads values other than tensors with weights_only."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)


def load(state: Mapping[str, Any], folder: Path, *, no_dist: bool = False) -> None:
    """Fill `state` from a checkpoint folder: tensors in place, other values by `load_state_dict` or replaced.

    Raises: CheckpointException (a BaseException), or the error that it wraps, if the folder does not hold all of `state`.
    """
    with warnings.catch_warnings():
        if no_dist:  # torch warns even if it was asked for
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        safely = {"storage_reader": SafeReader(str(folder)), "planner": SafePlanner()}
        dcp.load(state, no_dist=no_dist, **safely)


@torch.no_grad()
def stored_hf_weights(
    model: Decoder, adapter: BaseStateDictAdapter, checkpoint: Path, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Like `hf_weights`, but from a run's checkpoint folder and in one process. One block is in memory at a time.

    The model's own weights are not read and may be on the meta device.
    """
    stored = SafeReader(str(checkpoint)).read_metadata().state_dict_metadata
    for prefix, block in blocks_of(model):
        names = [canonical_fqn(prefix + name) for name, _ in block.named_parameters()]
        entries = {name: stored[name] for name in names if name in stored}
        state = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in entries.items()}
        load(state, checkpoint, no_dist=True)
        cast = {name: t.to(dtype) for name, t in state.items()}
        yield from to_hf(model, adapter, prefix, block, cast).items()
