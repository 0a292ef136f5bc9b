"""Where a rehearsed mixture's tokens go, which depends on weights: to all experts in turn, on every rank alike."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torchtitan.models.common.moe import TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from tests.gpu_rehearsal.device import Device


@contextmanager
def even_routing(device: Device) -> Iterator[None]:
    """Within this context routers choose experts in turn, and other ranks send as many tokens as this one."""
    choose, exchange = TokenChoiceTopKRouter.forward, AllToAllTokenDispatcher._token_count_exchange
    numbers = torch.zeros(0)  # of the last choice: tokens of each expert, [E]

    def forward(router: TokenChoiceTopKRouter, *args: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        nonlocal numbers
        weights, chosen, probabilities = choose(router, *args)
        with _disable_current_modes():
            turns = torch.arange(chosen.numel()) % router.num_experts
            numbers = torch.bincount(turns, minlength=router.num_experts)
            chosen._true = turns.view(tuple(chosen.shape))
        return weights, chosen, probabilities

    def exchanged(dispatcher: AllToAllTokenDispatcher, sent: Tensor, group: dist.ProcessGroup, ranks: int) -> Tensor:
        """Tokens of this rank for each expert, [E] -> of each rank for this one's experts, [ranks, E / ranks]"""
        exchange(dispatcher, sent, group, ranks)
        device.exchanges += 1
        with _disable_current_modes():
            sent._true = numbers
            own = numbers.view(ranks, -1)[dispatcher.ep_mesh.get_local_rank()]  # [E / ranks]
            received = own.expand(ranks, -1).contiguous()
        return device.known(received, sent.device)

    TokenChoiceTopKRouter.forward, AllToAllTokenDispatcher._token_count_exchange = forward, exchanged
    try:
        yield
    finally:
        TokenChoiceTopKRouter.forward, AllToAllTokenDispatcher._token_count_exchange = choose, exchange
