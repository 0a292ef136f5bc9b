"""The float32 copy of a bfloat16 CPU engine's output head."""

import pytest
import torch
from torch import nn

from torchtitan_rl.generator.patches import Float32Head


class Processor(nn.Module):
    def forward(self, head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ head.weight.T


class TiedEngine(nn.Module):
    """As vLLM's Cohere: the logits come from the embedding, and there is no lm_head."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(8, 4, dtype=torch.bfloat16)
        self.logits_processor = Processor()


@torch.no_grad()
def test_an_engine_without_a_head_computes_logits_from_a_copy_of_its_embedding():
    engine, hidden = TiedEngine(), torch.randn(3, 4)
    Float32Head(engine)
    logits = engine.logits_processor(engine.model.embed_tokens, hidden)  # bfloat16 weights would be another dtype
    torch.testing.assert_close(logits, hidden @ engine.model.embed_tokens.weight.float().T, rtol=0, atol=0)


class Engine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(4, 8, bias=False, dtype=torch.bfloat16)
        self.logits_processor = Processor()


@torch.no_grad()
def test_logits_come_from_the_copy_which_is_stale_until_it_is_refreshed():
    engine, hidden = Engine(), torch.randn(3, 4)
    wide = Float32Head(engine)
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


@torch.no_grad()
def test_logits_have_the_digits_of_float32_and_other_products_keep_theirs():
    engine, hidden = Engine(), torch.randn(64, 512).bfloat16().float()
    engine.lm_head = nn.Linear(512, 4096, bias=False, dtype=torch.bfloat16)
    Float32Head(engine)
    logits = engine.logits_processor(engine.lm_head, hidden)
    exact = hidden.double() @ engine.lm_head.weight.double().T
    torch.testing.assert_close(logits.double(), exact, rtol=0, atol=1e-5)
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"
    with pytest.raises(RuntimeError):
        engine.logits_processor(engine.lm_head, hidden[:, :3])
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"
