"""The float32 copy of a bfloat16 CPU engine's output head."""

import torch
from torch import nn

from torchtitan_rl.core.device import WideHead


class Processor(nn.Module):
    def forward(self, head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ head.weight.T


class Engine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(4, 8, bias=False, dtype=torch.bfloat16)
        self.logits_processor = Processor()


@torch.no_grad()
def test_logits_come_from_the_copy_which_is_stale_until_it_is_refreshed():
    engine, hidden = Engine(), torch.randn(3, 4)
    wide = WideHead(engine)
    before = hidden @ engine.lm_head.weight.float().T
    torch.testing.assert_close(engine.logits_processor(engine.lm_head, hidden), before, rtol=0, atol=0)
    assert wide.is_current()
    engine.lm_head.weight[5, 2] += 1
    assert not wide.is_current()
    torch.testing.assert_close(engine.logits_processor(engine.lm_head, hidden), before, rtol=0, atol=0)
    wide.refresh()
    assert wide.is_current()
    after = hidden @ engine.lm_head.weight.float().T
    torch.testing.assert_close(engine.logits_processor(engine.lm_head, hidden), after, rtol=0, atol=0)
    assert list(engine.state_dict()) == ["lm_head.weight"]  # a reload looks for no weights of the copy
