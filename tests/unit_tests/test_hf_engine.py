"""Transformers' decoders against their engines: what a push proves, and that engine and policy do not change each other."""

import pytest
import torch

from tests.parts.hf_decoders import BOUNDS, Engine, backward, save_hf_family, sequences
from tests.parts.only_rank import only_rank
from tests.parts.tiny import sharded_policy
from torchtitan_rl.sync.weight_sync import WeightSyncError

BUILT_BY_VLLM = {"gemma3_text": False, "olmo2": True, "granite": False}
"""Whether the family's engine is vLLM's Transformers backend, which builds on the trainer's own classes."""


@pytest.fixture(scope="module", params=list(BUILT_BY_VLLM))
def pair(request, tmp_path_factory):
    """(family, folder, policy, its adapter, engine, log-probabilities and gradients from before the engine's start)."""
    folder = tmp_path_factory.mktemp(request.param)
    save_hf_family(folder, request.param)
    with only_rank():
        model, adapter = sharded_policy(folder)
        before = computed(model)
        engine = Engine(folder)
        yield request.param, folder, model, adapter, engine, before
        engine.generator.close()


def computed(model) -> list[torch.Tensor]:
    """The log-probabilities of `sequences` and the gradient of each parameter."""
    model.zero_grad()
    logprobs = backward(model, sequences(), 73)
    return [logprobs, *(p.grad.full_tensor().clone() for p in model.parameters())]


def test_engine_equals_the_policy_without_changing_it(pair):
    """Bit for bit: the policy from before the engine's start, and one that is built after it."""
    family, folder, model, adapter, engine, before = pair
    kind = engine.generator.llm.apply_model(lambda m: type(m).__name__)[0]
    assert kind.startswith("Transformers") is BUILT_BY_VLLM[family], kind
    assert engine.push(model, adapter) <= BOUNDS["engine"]
    assert all(map(torch.equal, before, computed(model)))
    later, _ = sharded_policy(folder)
    assert all(map(torch.equal, before, computed(later)))
    assert engine.push(later, adapter) <= BOUNDS["engine"]


WRONG = {"gemma3_text": {"sliding_window": 13}, "granite": {"logits_scaling": 3.1}}
"""A detail of each family that weights do not show, a little off: the window by one token, the logit scale by 3 %."""


def test_wrong_window_or_logit_scale_is_detected_at_the_first_push(pair, tmp_path):
    """The policy has the same weights, so each of them arrives. Its computation differs from the engine's."""
    family, _, _, adapter, engine, _ = pair
    if family not in WRONG:
        pytest.skip("has neither")
    save_hf_family(tmp_path, family, **WRONG[family])
    wrong, _ = sharded_policy(tmp_path)
    with pytest.raises(WeightSyncError, match="although every weight arrived. They compute different models"):
        engine.push(wrong, adapter)
