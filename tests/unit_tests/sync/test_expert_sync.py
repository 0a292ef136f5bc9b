"""Pushes of a mixture of experts into a real engine: they arrive, and each that does not is named with its expert."""

import pytest
import torch

from tests.parts.pushes import Pair
from tests.parts.tiny import save_odd_checkpoint
from torchtitan_rl.device import ON_CPU
from torchtitan_rl.sync import in_process
from torchtitan_rl.sync.engine_weights import is_experts, unpacked
from torchtitan_rl.sync.in_process import OTHER_VALUES
from torchtitan_rl.sync.weight_sync import NOT_SENT

EXPERTS = "model.layers.2.mlp.experts"
GATE, UP, DOWN = (f"{EXPERTS}.3.{name}_proj.weight" for name in ("gate", "up", "down"))
ROUTER = "model.layers.0.mlp.gate.weight"

pytestmark = pytest.mark.usefixtures("restored")


@pytest.fixture(scope="module")
def pair(one_rank, tmp_path_factory):
    made = Pair(
        tmp_path_factory.mktemp("experts"),
        lambda folder: save_odd_checkpoint(
            folder, "qwen3_moe", tie=False, max_position_embeddings=384, moe_intermediate_size=64
        ),
    )
    yield made
    made.generator.close()


def change(pair, version: int) -> None:
    """So that no expert or half of one is like another."""
    pair.change_all(version, lambda shard, random: shard.add_(0.02 * random))


def test_three_pushes_of_changed_experts_give_the_policys_logprobs(pair):
    for version in (1, 2, 3):
        change(pair, version)
        pair.sync()
        assert pair.worst_diff(version) < 1e-5


def old_values(pair) -> dict:
    return {name: tensor.clone() for name, tensor in pair.weights()}


@pytest.mark.parametrize("name", [GATE, UP, DOWN, ROUTER])
def test_stale_scaled_and_permuted_matrices_are_named(pair, name):
    stale = old_values(pair)[name]
    change(pair, 1)
    now = old_values(pair)[name]
    for wrong in (stale, now * 1.01, now.roll(1, 0), now.roll(1, 1)):
        assert f"policy's: {name} {OTHER_VALUES}. Nothing" in pair.fault_with({name: wrong})


SWAPPED = [tuple(f"{EXPERTS}.{number}.{one}_proj.weight" for number in (1, 4)) for one in ("gate", "up", "down")]


@pytest.mark.parametrize(("one", "other"), [*SWAPPED, (GATE, UP)])
def test_swapped_experts_or_halves_are_both_named(pair, one, other):
    weights = old_values(pair)
    said = pair.fault_with({one: weights[other], other: weights[one]})
    assert f"policy's: {one} {OTHER_VALUES}; {other} {OTHER_VALUES}. Nothing" in said


def test_omitted_expert_is_named(pair):
    assert f"{DOWN} {NOT_SENT}" in pair.fault_with({DOWN: None})


def layer_of_experts(pair) -> torch.nn.Module:
    found = pair.generator.llm.apply_model(
        lambda model: [layer for path, layer in model.named_modules() if is_experts(layer) and path.startswith(EXPERTS)]
    )
    return found[0][0]


@pytest.mark.parametrize("parameter", ["w13_weight", "w2_weight"])
def test_one_element_changed_in_the_engine_is_named(pair, parameter):
    layer = layer_of_experts(pair)
    stored = getattr(layer, parameter)
    kept = stored.detach().clone()
    stored.data[3, 5, 7] += 0.5  # of expert 3, wherever it is stored
    said = pair.weight_sync.evidence()
    stored.data.copy_(kept)
    assert f"not the policy's (compared now): {EXPERTS}.3." in said
    assert "; " not in said


def test_vllm_still_reloads_experts_wrongly_without_our_mending(pair, monkeypatch):
    """If this fails, vLLM packs experts on every reload: remove `repack_experts` from generator/patches.py."""
    if not ON_CPU:
        pytest.skip("a GPU engine packs nothing")
    monkeypatch.setattr(in_process, "repack_experts", lambda model: None)
    assert f"{EXPERTS.replace('2', '0')}.0.gate_proj.weight {OTHER_VALUES}" in pair.fault_with({})


@pytest.mark.skipif(not ON_CPU, reason="a GPU engine packs nothing")
@pytest.mark.parametrize("rows", [64, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vllms_packing_is_undone(dtype, rows):
    from vllm._custom_ops import cpu_prepack_moe_weight

    isa = "amx" if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else "vec"  # noqa: SLF001
    weights = torch.randn(2, rows, 96).to(dtype)
    packed = cpu_prepack_moe_weight(weights, isa)
    assert torch.equal(unpacked(packed, rows, 96, lambda matrix: cpu_prepack_moe_weight(matrix[None], isa)), weights)
