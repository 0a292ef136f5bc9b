"""What a checkpoint of the policy holds in memory, with tensors on the CPU."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.parts.tiny import tiny_spec
from torchtitan_rl.command import export
from torchtitan_rl.models.hf import hf_weights
from torchtitan_rl.run.checkpointer import policy_state
from torchtitan_rl.run.safe_load import stored_hf_weights
from torchtitan_rl.trainer.model_loader import meta_model

pytestmark = pytest.mark.usefixtures("one_rank")


def sharded_model():
    model = meta_model(tiny_spec())
    for layer in model.layers.values():
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p)
    return model


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


def bytes_beside(state, model):
    """Bytes of tensors in `state` that are not the model's own."""
    own = {local(p).untyped_storage().data_ptr() for p in model.parameters()}
    tensors = {id(t): local(t) for t in state.values()}
    return sum(t.nbytes for t in tensors.values() if t.untyped_storage().data_ptr() not in own)


def test_the_state_is_the_sharded_parameters_themselves():
    model = sharded_model()
    state = policy_state(model)
    assert bytes_beside(state, model) == 0
    assert all(isinstance(t, DTensor) for t in state.values())
    assert sum(t.numel() for t in state.values()) == sum(p.numel() for p in model.parameters())


def test_export_reads_the_stored_policy_block_by_block(tmp_path):
    spec, model = tiny_spec(), sharded_model()
    dcp.save(policy_state(model), checkpoint_id=str(tmp_path))
    adapter = spec.state_dict_adapter(spec.model, None)
    found = dict(stored_hf_weights(meta_model(spec), adapter, tmp_path, torch.bfloat16))
    expected = dict(hf_weights(model, adapter, torch.bfloat16))
    assert found.keys() == expected.keys()
    assert "lm_head.weight" in found
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_the_export_script_writes_files_of_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "SHARD_BYTES", 100)
    tensors = {f"w{i}": torch.full((10,), float(i)) for i in range(5)} | {"lm_head.weight": torch.zeros(10)}
    export.write_safetensors(iter(tensors.items()), True, tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert index["metadata"]["total_size"] == 200
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])
    assert sorted(index["weight_map"]) == [f"w{i}" for i in range(5)]
