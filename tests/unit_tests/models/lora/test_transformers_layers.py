"""LoRA in transformers' layers: computed as dense weights would be, pushed, proven, and read and written as peft does."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.parts.hf_decoders import backward, logprobs_of, sequences, unsharded_policy
from tests.parts.tiny import change_adapters, sharded_policy
from torchtitan_rl.errors import UserError
from torchtitan_rl.models.hf_config import spec_from_folder
from torchtitan_rl.models.lora.adapters import Lora
from torchtitan_rl.models.lora.folder import write_adapter
from torchtitan_rl.models.lora.lora_config import LoraConfig, is_adapter
from torchtitan_rl.trainer.model_loader import meta_model

FAMILIES = ("gemma3_text", "mistral", "olmo2", "phi3", "smollm3", "granite", "qwen3_5_text")
CONFIG = LoraConfig(rank=6, alpha=9.0)

pytestmark = pytest.mark.usefixtures("one_rank")


def adapted(folder, config: LoraConfig = CONFIG, version: int = 1):
    """Returns the policy of a folder with random adapters, and its LoRA."""
    lora = Lora(config)
    model, _ = sharded_policy(folder, lora=lora, activation_checkpoint="full")
    with torch.no_grad():
        change_adapters(model, version)
    return model, lora


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_equal_dense_weights_in_float64(family_folder, family):
    """W + scale B A in transformers' own model. For its gradient G, those of A and B are scale B^T G and scale G A^T."""
    model, lora = adapted(family_folder(family))
    parts = sequences()
    found = backward(model, parts, 73)
    sent = {name: tensor.double() for name, tensor in lora.weights(torch.float32)}
    dense = AutoModelForCausalLM.from_pretrained(
        family_folder(family), dtype=torch.float64, attn_implementation="eager"
    )
    layers = {name.removesuffix(".lora_A.weight") for name in sent if ".lora_A." in name}
    with torch.no_grad():
        for layer in layers:
            a, b = (sent[f"{layer}.lora_{one}.weight"] for one in "AB")
            dense.get_submodule(layer).weight.add_(lora.scale * b @ a)
    logprobs = []
    for ids in parts:
        logp = dense(ids[None]).logits[0, :-1].log_softmax(-1)  # [L - 1, V]
        logprobs.append(logp.gather(-1, ids[1:, None])[:, 0])
    torch.cat(logprobs).mean().backward()
    assert (found - torch.cat(logprobs)).abs().max() <= (1e-4 if family == "qwen3_5_text" else 2e-5)
    gradients = dict(_by_name(lora, {id(p): p.grad for p in model.parameters()}))
    assert gradients.keys() == sent.keys()
    for layer in layers:
        whole = dense.get_submodule(layer).weight.grad
        a, b = (sent[f"{layer}.lora_{one}.weight"] for one in "AB")
        for one, theirs in (("A", lora.scale * b.T @ whole), ("B", lora.scale * whole @ a.T)):
            ours = gradients[f"{layer}.lora_{one}.weight"]
            assert (ours - theirs).abs().max() <= 1e-5, f"{layer} {one}"


def _by_name(lora: Lora, values: dict):
    """Yields each exported name with its parameter's value."""
    for parameter, exported in lora._exported:
        for name, rows in exported.items():
            yield name, values[id(parameter)].full_tensor()[rows]


@pytest.mark.parametrize("family", ["gemma3_text", "phi3"])
def test_only_adapters_are_trained_and_without_them_the_policy_is_the_base(family_folder, family):
    model, lora = adapted(family_folder(family))
    assert all(p.requires_grad == is_adapter(name) for name, p in model.named_parameters())
    base = unsharded_policy(family_folder(family))
    plain = backward(base, sequences(), 73)
    with torch.no_grad(), lora.off(model):
        ours = np.concatenate([logprobs_of(model, ids) for ids in sequences()])
    np.testing.assert_allclose(ours, plain.numpy(), atol=1e-5)


def test_query_key_and_value_have_an_a_of_their_own_as_with_peft(family_folder, tmp_path):
    folder = family_folder("gemma3_text")
    model, lora = adapted(folder)
    sent = {name: tensor.clone() for name, tensor in lora.weights(torch.float32)}
    queries = "model.layers.0.self_attn.{}_proj.lora_A.weight"
    assert not torch.equal(sent[queries.format("q")], sent[queries.format("k")])
    write_adapter(sent, CONFIG, str(folder), tmp_path)
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    assert described["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.mark.parametrize(
    ("family", "targets", "said"),
    [
        ("phi3", ("gate_proj",), "gate_proj and up_proj, which are one gate_up_proj"),
        ("starcoder2", ("qkv_proj", "gate_proj"), "matrices of the model, which has no gate_proj"),
    ],
)
def test_targets_that_a_model_lacks_are_refused(family_folder, family, targets, said):
    spec = spec_from_folder(family_folder(family))
    with pytest.raises(UserError, match=f"trainer.lora.targets = .*{said}"):
        meta_model(spec, Lora(LoraConfig(rank=4, targets=targets)))
