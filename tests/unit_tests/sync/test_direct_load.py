"""Weights copied straight to where a GPU engine has them: fused, split over ranks, padded."""

import pytest
import torch

from tests.gpu_rehearsal.push import engine_model
from torchtitan_rl.sync.checksum import Matrices, place_weights
from torchtitan_rl.sync.engine_weights import EngineWeights, find_base

HEAD_DIM = 8
SHAPES = {
    "model.embed_tokens.weight": (70, 16), "model.norm.weight": (16, 1), "lm_head.weight": (70, 16),
    **{f"model.layers.0.self_attn.{name}_proj.weight": (rows, 16) for name, rows in (("q", 32), ("k", 16), ("v", 16))},
    "model.layers.0.self_attn.o_proj.weight": (16, 32), "model.layers.0.mlp.gate.weight": (3, 16),
    **{
        f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight": (16, 24) if name == "down" else (24, 16)
        for expert in range(3) for name in ("gate", "up", "down")
    },
}  # fmt: skip


def full_tensors():
    torch.manual_seed(0)
    return {name: torch.randn(rows, *(columns,) * (columns > 1)).bfloat16() for name, (rows, columns) in SHAPES.items()}


def engine(rank, degree):
    sizes = {"dtype": torch.bfloat16, "device": "cpu"}
    model = engine_model(SHAPES, degree=degree, head_dim=HEAD_DIM, **sizes)
    weights = EngineWeights(SHAPES, rank=rank, degree=degree, dtype=torch.bfloat16, device=torch.device("cpu"))
    find_base(weights, model, None)
    return model, weights


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_tensors_are_copied_to_their_places_on_every_rank(degree):
    full = full_tensors()
    for rank in range(degree):
        model, weights = engine(rank, degree)
        weights.load([full])
        q, k, v, o = (full[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkvo")
        qkv = [q.chunk(degree)[rank]] + [t.chunk(min(degree, 2))[rank * min(degree, 2) // degree] for t in (k, v)]
        attention = model.model.layers.get_submodule("0.self_attn")
        assert torch.equal(attention.qkv_proj.weight, torch.cat(qkv))
        assert torch.equal(attention.o_proj.weight, o.chunk(degree, 1)[rank])
        assert torch.equal(model.model.norm.weight, full["model.norm.weight"])
        embedding = torch.zeros(128, 16, dtype=torch.bfloat16)
        embedding[:70] = full["model.embed_tokens.weight"]
        assert torch.equal(model.model.embed_tokens.weight, embedding.chunk(degree)[rank])
        experts = model.model.layers.get_submodule("0.mlp.experts")
        for expert in range(3):
            gate, up, down = (
                full[f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down")
            )
            assert torch.equal(experts.w13_weight[expert], torch.cat([t.chunk(degree)[rank] for t in (gate, up)]))
            assert torch.equal(experts.w2_weight[expert], down.chunk(degree, 1)[rank])


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_their_checksums_are_those_of_the_full_tensors_and_see_a_swap(degree):
    full, sums, copies = full_tensors(), 0, 0
    for rank in range(degree):
        model, weights = engine(rank, degree)
        weights.load([full])
        sums, copies = sums + weights.checksums(packed=True), weights.copies(packed=True)
    expected = [
        Matrices(place_weights(torch.arange(len(t)))[None], 0, 1.0, [lambda t=t: t], []).checksums(t.dtype)
        for t in full.values()
    ]
    assert torch.equal(sums, torch.cat(expected) * copies)
    experts = model.model.layers.get_submodule("0.mlp.experts")
    before = weights.checksums(packed=True)
    experts.w13_weight.data[[0, 2]] = experts.w13_weight.data[[2, 0]]
    changed = [name for name, differs in zip(SHAPES, before != weights.checksums(packed=True), strict=True) if differs]
    assert changed == [
        f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight" for expert in (0, 2) for name in ("gate", "up")
    ]
