"""What a push and an engine read of a trainer, for a policy without an optimizer."""

from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from torchtitan_rl.device import DEVICE_TYPE
from torchtitan_rl.generator.generator import Generator
from torchtitan_rl.models.lora.adapters import Lora
from torchtitan_rl.models.score import score
from torchtitan_rl.sync.in_process import begin_sampling, load_base
from torchtitan_rl.types import SegmentLayout

MULTIPLE = 8
"""Sequences are padded to this, for tensor parallelism."""

SEQUENCES = [[3, 12, 4, 12, 5, 14, 9, 1], [7, 8, 9], [100, 101, 102, 103, 104, 105], [5, 5, 5, 5, 5]]


def fill(generator: Generator, weights: Mapping[str, Tensor], version: int = 0) -> None:
    """Let an engine that is awake sample with these weights."""
    load_base(generator, weights.items())
    begin_sampling(generator, version)


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
        self.parallel_dims = SimpleNamespace(dp_shard=1)

    @torch.no_grad()
    def token_logprobs(self, ids, temperature: float = 1.0) -> np.ndarray:
        """Log pi of ids[1:], [L - 1]."""
        padding = -len(ids) % MULTIPLE
        tokens = torch.tensor([*ids, *[0] * padding], device=DEVICE_TYPE)  # [T]
        layout = SegmentLayout.of([len(tokens)], device=DEVICE_TYPE)
        logprobs = score(self.model, tokens, tokens.roll(-1), layout, temperature).logprobs
        return logprobs[: len(ids) - 1].cpu().float().numpy()
