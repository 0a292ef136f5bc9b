"""Which experts the engine chose for each token that it read, for `generator.router_replay`."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from torchtitan_rl.generator.patches import (
    cache_blocks,
    capture_experts,
    forward_slots,
    model_runner,
)
from torchtitan_rl.types import NO_RECORD, RecordArray

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput


def output_records(output: "RequestOutput", name: str) -> RecordArray | None:
    """What a GPU engine recorded: vLLM returns it (`enable_return_routed_experts`). [tokens read, layers * K]"""
    [turn] = output.outputs
    if turn.routed_experts is None:  # cut before its first token
        return None
    experts = turn.routed_experts.astype(np.uint8)  # [tokens read, layers, K]
    return experts.reshape(len(experts), -1)


class SlotRecords:
    """What a CPU engine recorded, whose model runner returns nothing: a row for each slot of its KV cache, which holds
    a token's key and value. So requests that share a prefix in the cache share its rows.
    """

    def __init__(self, llm: "LLM") -> None:
        engine = llm.llm_engine
        model, cache = engine.model_config, engine.vllm_config.cache_config
        shape = model.get_total_num_hidden_layers(), model.get_num_experts_per_tok()
        self._block_size = cache.block_size
        self._slots = torch.full(
            (cache.num_gpu_blocks * cache.block_size, *shape), NO_RECORD, dtype=torch.uint8
        )  # [slots, layers, K]
        self._runner = model_runner(llm)
        capture_experts(llm, self)

    def capture(self, layer_id: int, topk_ids: Tensor) -> None:
        """Keep the experts of the tokens in one layer's forward, [tokens, K]. vLLM's routers call it."""
        self._slots[forward_slots(), layer_id] = topk_ids.to(torch.uint8)

    def of(self, output: "RequestOutput", name: str) -> RecordArray:
        """Returns the experts of the tokens that the request `name` has read, all but its last: [tokens, layers * K].

        None of a request that is not in the batch: its slots may be another's by now. That is one which was preempted,
        or has not begun, when the step was cut.
        """
        [turn] = output.outputs
        count = len(output.prompt_token_ids) + len(turn.token_ids) - 1
        blocks = cache_blocks(self._runner, name)
        begins = torch.tensor(blocks, dtype=torch.int64) * self._block_size  # [blocks]
        slots = begins[:, None] + torch.arange(self._block_size)  # [blocks, block size]
        slots = slots.flatten()[:count]  # [count]
        return self._slots[slots].flatten(1).numpy()
