"""How a CPU engine draws tokens: one random number for each of them, where vLLM makes one for each word of the vocabulary."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase


def draw_by_one_number(worker: "WorkerBase") -> None:
    """Give this engine the sampler below; its log-probabilities stay vLLM's."""
    sampler = worker.model_runner.sampler
    sampler.topk_topp_sampler.forward = _draw
    sampler.gather_logprobs = _of_sampled


def _draw(
    logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
) -> tuple[Tensor, Tensor]:
    """logits [T, V] -> tokens [T], log-probabilities [T, V]; `generators` are the rows' that have a seed of their own."""
    logprobs = apply_top_k_top_p(logits, k, p).log_softmax(dim=-1, dtype=torch.float32)  # [T, V]
    numbers = torch.rand(len(logits), 1, dtype=torch.float64)  # [T, 1]
    for row, generator in generators.items():
        numbers[row] = torch.rand(1, generator=generator, dtype=torch.float64)
    # In float64, so that tokens of 1e-9 are drawn as often as they should be.
    up_to = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)  # [T, V]
    tokens = torch.searchsorted(
        up_to, numbers * up_to[:, -1:], right=True
    )  # [T, 1]: the first that is above the number
    return tokens.squeeze(1).clamp_(max=logits.shape[1] - 1), logprobs


def _of_sampled(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
    """logprobs [T, V], token_ids [T] -> those of the tokens [T, 1], without ranks: vLLM compiles a function to count them."""
    if num_logprobs:
        return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
    token_ids = token_ids.unsqueeze(1)  # [T, 1]
    ranks = torch.zeros(len(token_ids), dtype=torch.int64)
    return LogprobsTensors(token_ids.to(torch.int32), logprobs.gather(1, token_ids), ranks)
