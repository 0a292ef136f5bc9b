"""Decoders that run with transformers' layers: what they compute, what is pushed and exported, and what is refused."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.parts.hf_decoders import (
    BOUNDS,
    ODD_DIMENSIONS,
    TIED,
    WINDOW,
    backward,
    policy_figures,
    save_hf_family,
    sequences,
    shared_and_alone,
    transformers_logprobs,
)
from tests.parts.tiny import sharded_policy
from tests.parts.tiny_trainer import tiny_trainer
from tests.unit_tests.models.lora.test_adapters import copies, saver, updated
from torchtitan_rl.command.export import copy_assets, write_safetensors
from torchtitan_rl.errors import UserError
from torchtitan_rl.generator.generator import Generator
from torchtitan_rl.models.hf import hf_weights
from torchtitan_rl.models.hf_config import spec_from_folder
from torchtitan_rl.models.hf_decoder import check_other_parts, check_parallelism, packed_attention
from torchtitan_rl.models.hf_support import Calls, Unsupported
from torchtitan_rl.models.lora.lora_config import LoraConfig
from torchtitan_rl.run.safe_load import stored_hf_weights
from torchtitan_rl.trainer.model_loader import meta_model
from torchtitan_rl.trainer.optimizer import AdamW
from torchtitan_rl.trainer.trainer import Trainer
from torchtitan_rl.trainer.trainer_config import LRSchedule, TrainerConfig

FAMILIES = ("gemma3_text", "olmo2", "granite")
"""Windows, scaled embeddings and tied heads; norms after the layers; scaled logits, residuals and attention."""


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("family", FAMILIES)
def test_policy_and_gradients_equal_transformers(family_folder, family):
    folder = family_folder(family)
    figures = policy_figures(folder)
    assert {name: value for name, value in figures.items() if not value <= BOUNDS[name]} == {}
    model, adapter = sharded_policy(folder, activation_checkpoint="full")
    backward(model, sequences(), 73)
    _, expected = transformers_logprobs(folder, sequences())
    found = adapter.to_hf(
        {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}
    )
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        theirs = expected[name]  # of the mean over 73 labels
        assert (grad.full_tensor() - theirs).abs().max() <= 1e-5 * theirs.abs().max(), name


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_5_text"])
def test_weights_round_trip_bitwise(family_folder, family):
    model, adapter = sharded_policy(family_folder(family))
    stored = load_file(family_folder(family) / "model.safetensors")
    back = dict(hf_weights(model, adapter, torch.float32))
    assert back.keys() == stored.keys() | {"lm_head.weight"}
    assert all(torch.equal(back[name], stored[name]) for name in stored)
    assert torch.equal(back["lm_head.weight"], back["model.embed_tokens.weight"]) is (family in TIED)


def test_sliding_window_applies_across_a_shared_prompt(family_folder):
    """The second sequence continues the first one's 20 tokens, of which only some are in its window."""
    model, _ = sharded_policy(family_folder("gemma3_text"))
    parts = sequences()
    assert WINDOW < 20
    for shared, alone in shared_and_alone(model, parts[0][:20], parts[2][:9], parts[3][:9]):
        torch.testing.assert_close(shared, alone, atol=1e-5, rtol=0)


def trainer_of(folder, **config) -> Trainer:
    made = partial(tiny_trainer, str(folder), model_spec=spec_from_folder(folder))
    return made(optimizer=AdamW.Config(lr=1e-3), lr_scheduler=LRSchedule(warmup_steps=0), **config)


@pytest.mark.parametrize("family", ["gemma3_text", "olmo2", "qwen3_5_text"])
def test_policy_trains_resumes_bitwise_and_its_export_has_the_same_logprobs(family_folder, tmp_path, family):
    folder, exported = family_folder(family), tmp_path / "exported"
    first = trainer_of(folder)
    start = copies(first)
    assert updated(first).optimizer_steps == 1
    assert all(not torch.equal(now, start[name]) for name, now in copies(first).items())
    checkpoints = saver(first, tmp_path)
    checkpoints.save(1)
    saved = checkpoints.folder.steps()[1]
    spec = spec_from_folder(folder)
    exported.mkdir()
    weights = stored_hf_weights(meta_model(spec), spec.state_dict_adapter(spec.model, None), saved, torch.float32)
    write_safetensors(weights, spec.model.enable_weight_tying, exported)
    copy_assets(folder, exported, "float32")
    ids = sequences()[0]
    theirs, _ = transformers_logprobs(exported, [ids])
    assert abs(first.token_logprobs(ids.numpy()) - theirs.numpy()).max() <= BOUNDS["transformers"]

    updated(first)
    second = trainer_of(folder)
    saver(second, tmp_path).load(saved)
    updated(second)
    ours, theirs = copies(first), copies(second)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


REFUSED = [
    ("gemma2", {}, "its attention uses softcap"),
    ("mixtral", {}, "a mixture of experts"),
    ("mamba", {}, "a hybrid or recurrent model, with layers of type linear_attention"),
    ("recurrent_gemma", {}, "recurrent"),
    ("gpt_neox", {}, "its parts are"),
    ("phi", {}, "a bias on its output head|its parts are"),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, "transforms its logits by more than a positive factor"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "its attention is not causal"),
    ("mistral", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type 'dynamic'"),
    ("stablelm", {"hidden_size": 192}, "transformers' code for it raises TypeError: packed_attention"),
    ("cohere", {}, "it has rms_norm_eps, for which vLLM uses RMSNorm"),
    ("mistral", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "it is quantized"),
]


@pytest.mark.parametrize(("family", "settings", "said"), REFUSED, ids=[f"{one[0]}-{one[2][:12]}" for one in REFUSED])
def test_unsupported_model_features_are_refused_by_name(tmp_path, family, settings, said):
    entries = {**ODD_DIMENSIONS, "pad_token_id": None, **settings}
    config = AutoConfig.for_model(family, **entries)
    with torch.device("meta"):
        plain = AutoConfig.for_model(family, **ODD_DIMENSIONS, pad_token_id=None)
        names = [type(AutoModelForCausalLM.from_config(plain)).__name__]
    config.architectures = names
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    with pytest.raises(UserError, match=f"hf_assets_path = .*a dense decoder, but .*({said}).*docs/models.md"):
        spec_from_folder(tmp_path)


@pytest.mark.parametrize(
    ("family", "architecture", "said"),
    [
        ("gemma3n", "Gemma3nForConditionalGeneration", "multimodal or nested .*vision_config"),
        ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", "a mixture of experts"),
        ("t5gemma", "T5GemmaForConditionalGeneration", "nested|encoder-decoder"),
    ],
)
def test_multimodal_hybrid_and_encoder_models_are_refused(tmp_path, family, architecture, said):
    config = AutoConfig.for_model(family).to_dict() | {"architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    with pytest.raises(UserError, match=f"says {architecture}, and .*({said})"):
        spec_from_folder(tmp_path)


def settings(degree: int = 1, max_model_len: int = 64) -> tuple[TrainerConfig, Generator.Config]:
    return TrainerConfig(), Generator.Config(tensor_parallel_degree=degree, max_model_len=max_model_len)


def test_tensor_parallelism_is_refused_by_name(family_folder):
    model = spec_from_folder(family_folder("olmo2")).model
    with pytest.raises(UserError, match="trainer.parallelism.tensor_parallel_degree = 2: expected 1 for olmo2.*FSDP"):
        check_parallelism(model, 2)
    check_other_parts(model, *settings(2), on_cpu=True)
    phi = spec_from_folder(family_folder("phi3")).model
    with pytest.raises(UserError, match="generator.tensor_parallel_degree = 2: expected 1 for phi3, whose"):
        check_other_parts(phi, *settings(2), on_cpu=True)


def test_adapters_that_the_engine_cannot_take_are_refused_by_name(family_folder):
    model, (trainer, generator) = spec_from_folder(family_folder("glm4")).model, settings()
    check_other_parts(model, trainer, generator, on_cpu=True)
    attention = LoraConfig(rank=4, targets=("qkv_proj", "o_proj", "down_proj"))
    check_other_parts(model, replace(trainer, lora=attention), generator, on_cpu=True)
    with pytest.raises(UserError, match="trainer.lora.targets = .*neither gate_proj nor up_proj for glm4"):
        check_other_parts(model, replace(trainer, lora=LoraConfig(rank=4)), generator, on_cpu=True)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5_text"])
def test_flex_attention_is_refused_for_windows_and_linear_layers(family_folder, family):
    model, (trainer, generator) = spec_from_folder(family_folder(family)).model, settings()
    expected = f"trainer.attention = 'flex': expected \"auto\" for {family}, which has sliding windows or linear layers"
    with pytest.raises(UserError, match=expected):
        check_other_parts(model, replace(trainer, attention="flex"), generator, on_cpu=False)
    olmo = spec_from_folder(family_folder("olmo2")).model
    check_other_parts(olmo, replace(trainer, attention="flex"), generator, on_cpu=False)


def test_model_with_its_own_mask_or_bidirectional_attention_is_refused():
    q = torch.zeros(1, 2, 3, 4)  # [1, N, T, H]
    for options, said in (({"attention_mask": q[0, 0]}, "uses attention_mask"), ({"is_causal": False}, "not causal")):
        with pytest.raises(Unsupported, match=said):
            packed_attention(torch.nn.Identity(), q, q, q, packed=Calls(), **{"attention_mask": None, **options})


def test_cohere_2_is_refused_if_the_engine_window_is_longer(tmp_path):
    save_hf_family(tmp_path, "cohere2")
    model = spec_from_folder(tmp_path).model
    check_other_parts(model, *settings(max_model_len=WINDOW), on_cpu=True)
    with pytest.raises(UserError, match="generator.max_model_len = 13: expected at most the sliding window of"):
        check_other_parts(model, *settings(max_model_len=WINDOW + 1), on_cpu=True)
