"""What a bfloat16 CPU engine rounds: the float32 copy of its output head, and its norms."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import rms_norm

from torchtitan_rl import build
from torchtitan_rl.device import ON_CPU
from torchtitan_rl.generator.generator import Generator
from torchtitan_rl.generator.patches import Float32Head, fuse_norms
from torchtitan_rl.generator.start import start_engine
from torchtitan_rl.models.hf_decoder import HFDecoder


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


@pytest.mark.parametrize("shape", ["whole", "part of a row"])
def test_norms_round_as_pytorchs_do(shape):
    from vllm import ir

    torch.manual_seed(0)
    x, weight = torch.randn(40, 3, 64).bfloat16(), torch.rand(64).bfloat16() + 0.5
    if shape == "part of a row":  # as queries and keys
        x = torch.randn(40, 5, 64).bfloat16()[:, 1:4]
    expected = rms_norm(x, (64,), weight, 1e-6)
    for norm in ("rms_norm", "rms_norm", "fused_add_rms_norm"):
        [kernel] = fuse_norms()[norm]
        impl = getattr(ir.ops, norm).impls[kernel]
        assert impl.supported
        if norm == "rms_norm":
            found = impl.impl_fn(x, weight, 1e-6)
        else:
            found, _ = impl.impl_fn(x, torch.zeros_like(x), weight, 1e-6)
        assert (found == expected).float().mean() > 0.95  # vLLM's own: two thirds
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("model", "rounds_once"), [(object(), True), (object.__new__(HFDecoder.Config), False)])
def test_engines_round_norms_as_the_policys_modules_do(model, rounds_once, tmp_path):
    generator = SimpleNamespace(tensor_parallel_degree=1, router_replay=True, build=lambda **given: given)
    config = SimpleNamespace(
        generator=generator, model_spec=SimpleNamespace(model=model), hf_assets_path=str(tmp_path), sampling=None, seed=0,
        conversations=SimpleNamespace(tool_call_parser=None),
    )  # fmt: skip
    assert build._build_generator(config, None, None, None)["norms_round_once"] is rounds_once


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rounds_once", [True, False])
def test_a_cpu_engine_in_bfloat16_gets_the_norms_that_round_once(one_rank, dtype, rounds_once, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("vllm.LLM", lambda **given: given)
    given = start_engine(Generator.Config(dtype=dtype), str(tmp_path), rounds_once)
    assert ("ir_op_priority" in given) == (ON_CPU and rounds_once and dtype == "bfloat16")
