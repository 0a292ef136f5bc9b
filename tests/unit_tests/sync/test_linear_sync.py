"""Pushes of a Qwen3.5 into a real engine: they arrive, each tensor that does not is named, and no state outlives a sequence."""

import numpy as np
import pytest
import torch

from tests.parts.hf_decoders import save_hf_family
from tests.parts.pushes import PROMPTS, SEQUENCES, Pair
from tests.parts.tiny import sampled
from torchtitan_rl.device import ON_CPU
from torchtitan_rl.generator.patches import num_cached_blocks
from torchtitan_rl.sync.engine_weights import unpacked
from torchtitan_rl.sync.in_process import OTHER_VALUES
from torchtitan_rl.sync.weight_sync import NOT_SENT, WeightSyncError

LINEAR = "model.layers.2.linear_attn"
TENSORS = [
    *(f"{LINEAR}.{name}" for name in ("A_log", "dt_bias", "norm.weight", "conv1d.weight", "out_proj.weight")),
    *(f"{LINEAR}.in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")),
    *(f"model.layers.1.self_attn.{name}.weight" for name in ("q_proj", "q_norm")),
]
"""Those that no other family has, and a gated query's."""

MOST = 0.5
"""Differences in log-probability of bfloat16 and float32 that are allowed for a random model with sharp distributions."""

pytestmark = pytest.mark.usefixtures("restored")


@pytest.fixture(scope="module")
def pair(one_rank, tmp_path_factory):
    made = Pair(
        tmp_path_factory.mktemp("qwen3_5"),
        lambda folder: save_hf_family(folder, "qwen3_5_text", max_position_embeddings=384),
        dtype="bfloat16",
    )
    yield made
    made.generator.close()


def change(pair, version: int) -> None:
    pair.change_all(version, lambda shard, random: shard.mul_(1 + 0.1 * random))


def engine_logprobs(pair) -> np.ndarray:
    return np.concatenate([pair.generator.prompt_logprobs(np.array(ids)) for ids in SEQUENCES])


def test_three_pushes_give_the_policys_logprobs(pair):
    for version in (1, 2, 3):
        change(pair, version)
        pair.sync()
        assert pair.worst_diff(version) < MOST


def test_no_state_is_left_of_sequences_before_a_push(pair):
    """The engine's answer depends on its weights alone, bit for bit: after samples with others, and after a push of the same."""
    first = engine_logprobs(pair)
    change(pair, 1)
    pair.sync()
    list(sampled(pair.generator, PROMPTS, step=1))
    assert np.abs(engine_logprobs(pair) - first).max() > 1e-3
    pair.restore()
    pair.sync()
    np.testing.assert_array_equal(engine_logprobs(pair), first)
    assert num_cached_blocks(pair.generator.llm) == 0


def test_undefined_state_caches_change_nothing(pair):
    """As after a sleep, from which a GPU's engine wakes with undefined caches: each sequence begins with an empty state."""

    def undefine(model) -> int:
        caches = [c for name, part in model.named_modules() if name.endswith("linear_attn") for c in part.kv_cache]
        for cache in caches:
            cache.fill_(torch.nan)
        return len(caches)

    first = engine_logprobs(pair)
    assert pair.generator.inspect(undefine) == 4  # of convolution and state, in two layers
    np.testing.assert_array_equal(engine_logprobs(pair), first)


def test_policy_without_a_state_in_its_engine_is_detected(pair, monkeypatch):
    """The weights arrive, but the policy computes another model: here, one whose states are never decayed."""
    for layer in pair.model.layers.values():
        if hasattr(layer, "linear_attn"):
            forward = layer.linear_attn.forward
            monkeypatch.setattr(layer.linear_attn, "forward", lambda *args, f=forward, **kw: f(*args, **kw).roll(1, 1))
    pair.begin_anew()
    with pytest.raises(WeightSyncError, match="although every weight arrived. They compute different models"):
        pair.sync()


@pytest.mark.parametrize("name", TENSORS)
def test_stale_changed_and_dropped_tensors_are_named(pair, name):
    stale = dict(pair.weights())[name].clone()
    change(pair, 1)
    now = dict(pair.weights())[name].clone()
    one = now.clone()
    one.view(-1)[-1] *= 1.01
    for tensor in (stale, one):
        assert not torch.equal(tensor, now)
        assert f"{name} {OTHER_VALUES}" in pair.fault_with({name: tensor})
    assert f"{name} {NOT_SENT}" in pair.fault_with({name: None})


@pytest.mark.skipif(not ON_CPU, reason="a GPU packs no weights")
def test_exchanged_elements_of_a_packed_convolution_are_named(pair):
    name = f"{LINEAR}.conv1d.weight"
    now = dict(pair.weights())[name].clone()
    for axis in (0, 2):
        assert f"{name} {OTHER_VALUES}" in pair.fault_with({name: now.roll(1, axis)})


@pytest.mark.skipif(not ON_CPU, reason="a GPU packs no weights")
def test_vllms_packing_of_a_convolution_is_undone():
    from vllm._custom_ops import causal_conv1d_weight_pack

    if not hasattr(torch.ops._C, "causal_conv1d_weight_pack"):
        pytest.skip("without AVX-512 vLLM packs no convolution")
    weight = torch.randn(256, 4).bfloat16()
    packed = causal_conv1d_weight_pack(weight)
    assert torch.equal(unpacked(packed, 256, 4, causal_conv1d_weight_pack)[0], weight)
