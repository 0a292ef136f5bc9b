"""Which tensors a checkpoint folder may hold besides the model's, and which not."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parts.hf_decoders import save_hf_family
from tests.parts.tiny import save_odd_checkpoint
from torchtitan_rl.errors import UserError
from torchtitan_rl.models.hf_config import spec_from_folder
from torchtitan_rl.trainer.weight_files import check_tensors


def add(folder, **tensors):
    """Add tensors to the folder's file. Returns it."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file)
    return folder


def check(folder):
    check_tensors(folder, spec_from_folder(folder))


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "olmo2", "granite"])
def test_unexpected_tensor_is_refused_by_name(tmp_path, family):
    save_odd_checkpoint(tmp_path, family) if family in ("qwen3", "qwen2", "llama") else save_hf_family(tmp_path, family)
    check(tmp_path)
    add(tmp_path, **{"model.layers.1.self_attn.extra.weight": torch.ones(3)})
    with pytest.raises(UserError, match="model.layers.1.self_attn.extra.weight is loaded by no part of that model"):
        check(tmp_path)


def test_weights_of_another_architecture_are_refused(tmp_path):
    save_odd_checkpoint(tmp_path, "qwen3")
    entries = json.loads((tmp_path / "config.json").read_text())
    entries |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    with pytest.raises(UserError, match=r"0.self_attn.k_norm.weight is loaded by no part of that model, .* and 3 more"):
        check(tmp_path)


def test_harmless_extra_tensors_of_published_checkpoints_are_allowed(tmp_path):
    """RoPE's frequencies, a tied head that is the embedding, and files that the index does not name."""
    save_odd_checkpoint(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    embedding = load_file(file)["model.embed_tokens.weight"]
    add(
        tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3), "lm_head.weight": embedding.clone()}
    )
    save_file({"layers.0.attention.wq.weight": embedding}, tmp_path / "consolidated.safetensors")
    index = {"weight_map": dict.fromkeys(load_file(file), file.name)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check(tmp_path)


def test_a_missing_tensor_and_one_of_another_shape_are_named_before_they_are_loaded(tmp_path):
    save_odd_checkpoint(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, file)
    with pytest.raises(UserError, match="but model.norm.weight is missing. Download"):
        check(tmp_path)
    save_file(tensors | {"model.norm.weight": norm[:5].clone()}, file)
    with pytest.raises(UserError, match=r"but model.norm.weight has shape \[5\] instead of \[\d+\]. Download"):
        check(tmp_path)


@pytest.mark.parametrize(
    ("index", "lacks"),
    [
        ('{"weight_map": {"a": 5}}', "5"),
        ('{"weight_map": {"a": "model-2.safetensors"}}', "model-2.safetensors"),
        ("{}", "a weight_map"),
        ("[]", "a weight_map"),
        ('{"weight_map": {"a": "mod', "a weight_map"),
        ("<html>not found</html>", "a weight_map"),
    ],
)
def test_an_index_whose_files_are_not_there_is_refused_also_beside_a_whole_file(tmp_path, index, lacks):
    save_odd_checkpoint(tmp_path, "llama")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match=f"files that its model.safetensors.index.json names, but it lacks {lacks}"):
        check(tmp_path)
