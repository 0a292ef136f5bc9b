"""Which tokens the engine kept when it sampled each token: by top_p, top_k, min_p or a grammar."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torchtitan_rl.generator.patches import batch_rows, model_runner, replace_sample
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
