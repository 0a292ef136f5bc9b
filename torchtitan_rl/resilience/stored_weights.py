"""Reads the weights of a run's checkpoint by their Hugging Face names, in one process."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from torchtitan_rl.core.trainer.hf import blocks_of, to_hf
from torchtitan_rl.resilience import safe_load


@torch.no_grad()
def stored_hf_weights(
    model: Decoder, adapter: BaseStateDictAdapter, checkpoint: Path, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Like `hf_weights`, but from a run's checkpoint folder and in one process. One block is in memory at a time.

    Args:
        model: has the checkpoint's architecture. Its weights are not read and may be on the meta device.
    """
    stored = safe_load.SafeReader(str(checkpoint)).read_metadata().state_dict_metadata
    for prefix, block in blocks_of(model):
        names = [canonical_fqn(prefix + name) for name, _ in block.named_parameters()]
        state = {n: torch.empty(stored[n].size, dtype=stored[n].properties.dtype) for n in names if n in stored}
        safe_load.load(state, checkpoint, no_dist=True)
        yield from to_hf(model, adapter, prefix, block, {name: t.to(dtype) for name, t in state.items()})
