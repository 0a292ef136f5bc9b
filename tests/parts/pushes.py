"""What a push and an engine read of a trainer, for a policy without an optimizer."""

from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from torchtitan_rl.device import DEVICE_TYPE
from torchtitan_rl.models.hf import hf_weights
from torchtitan_rl.models.lora.adapters import Lora
from torchtitan_rl.models.score import score
from torchtitan_rl.types import SegmentLayout

MULTIPLE = 8
"""Sequences are padded to this, for tensor parallelism."""

SEQUENCES = [[3, 12, 4, 12, 5, 14, 9, 1], [7, 8, 9], [100, 101, 102, 103, 104, 105], [5, 5, 5, 5, 5]]


class TokenizerStandIn:
    """The three things the generator asks of one; the tiny model's tokens stand for no text."""

    eos_token_id = 0
    chat_template = None
    added_tokens_decoder: dict = {}

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, token_ids))


class Policy:
    """A model that is pushed as a `Trainer`'s is."""

    def __init__(self, model, state_dict_adapter, *, dtype: str = "float32", lora: Lora | None = None) -> None:
        self.model, self.state_dict_adapter, self.lora = model, state_dict_adapter, lora
        self.config = SimpleNamespace(mixed_precision_param=dtype)
        self.whole_blocks = False
        self.replacement: Iterable[tuple[str, Tensor]] | None = None
        """What is sent in place of the weights."""

    def hf_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        if self.replacement is not None:
            return iter(self.replacement)
        return hf_weights(self.model, self.state_dict_adapter, dtype, whole_blocks=self.whole_blocks)

    @torch.no_grad()
    def token_logprobs(self, ids, temperature: float = 1.0) -> np.ndarray:
        """Log pi of ids[1:], [L - 1]."""
        padding = -len(ids) % MULTIPLE
        tokens = torch.tensor([*ids, *[0] * padding], device=DEVICE_TYPE)  # [T]
        layout = SegmentLayout.of([len(tokens)], device=DEVICE_TYPE)
        logprobs = score(self.model, tokens, tokens.roll(-1), layout, temperature).logprobs
        return logprobs[: len(ids) - 1].cpu().float().numpy()
