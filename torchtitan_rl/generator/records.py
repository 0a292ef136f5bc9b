"""What the engine records of each token that it reads: which tokens its sampler kept after it, or which experts its routers chose."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torchtitan_rl.generator.patches import (
    batch_rows,
    cache_blocks,
    capture_experts,
    forward_slots,
    model_runner,
    replace_sample,
)
from torchtitan_rl.types import NO_RECORD, RecordArray

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput


class KeptTokens:
    """The sets of an engine's sampler, a bit for each token of the vocabulary.

    They are exact, ties at the border included: a dropped token is one whose processed logit is -inf. vLLM's own
    `return_sampling_mask` exists for GPUs alone, and refuses greedy requests.
    """

    def __init__(self, llm: "LLM") -> None:
        self._runner = model_runner(llm)
        self._rows: dict[str, dict[int, RecordArray]] = {}
        """[ceil(V / 8)] by the engine's name of a request and the place of the token read; none where all were kept."""
        self._sample = replace_sample(self._runner, self._recorded)

    def _recorded(self, logits: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """vLLM's `Sampler.sample` of a batch, logits [N, V], with the kept tokens recorded."""
        sampled, processed = self._sample(logits, *args, **options)
        if processed is None:  # a greedy batch without log-probabilities: the probe's
            return sampled, None
        requests, names, places = batch_rows(self._runner, args)
        for aborted in self._rows.keys() - requests:
            del self._rows[aborted]
        rows = (processed.amin(1) == -torch.inf).nonzero()[:, 0].tolist()
        kept = processed[rows] > -torch.inf  # [rows, V]
        packed = np.packbits(kept.cpu().numpy(), axis=1, bitorder="little")  # [rows, ceil(V / 8)]
        for row, bits in zip(rows, packed, strict=True):
            self._rows.setdefault(names[row], {})[int(places[row])] = bits
        return sampled, processed

    def of(self, output: "RequestOutput", name: str) -> RecordArray | None:
        """Returns what was kept after each token that the request `name` has read, all but its last: [tokens, ceil(V / 8)].

        None if all its tokens were sampled from the whole vocabulary.
        """
        rows = self._rows.pop(name, None)
        if rows is None:
            return None
        [turn] = output.outputs
        count = len(output.prompt_token_ids) + len(turn.token_ids) - 1
        width = len(next(iter(rows.values())))
        records = np.full((count, width), NO_RECORD, np.uint8)
        for place, bits in rows.items():
            records[place : place + 1] = bits  # a GPU's engine may be a token ahead
        return records


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
