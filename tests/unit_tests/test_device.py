"""Every branch that only a GPU takes, on a simulated `torch.cuda` surface."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchtitan_rl import device
from torchtitan_rl.generator import patches, start
from torchtitan_rl.generator.generator import Generator


def test_expandable_segments_turn_vllms_own_all_reduce_off(monkeypatch):
    monkeypatch.setattr(start, "ON_CPU", False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512,expandable_segments:True")
    for degree in (1, 2):
        options = start.engine_options(Generator.Config(tensor_parallel_degree=degree))
        assert options.get("disable_custom_all_reduce", False) == (degree == 2)


def test_vllms_triton_attention_takes_float32():
    from vllm.config.attention import AttentionConfig
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    assert AttentionConfig(backend="TRITON_ATTN").backend.name == "TRITON_ATTN"
    assert torch.float32 in TritonAttentionBackend.supported_dtypes


def test_triton_uses_exact_float32_products():

    assert os.environ["TRITON_F32_DEFAULT"] == "ieee"


@pytest.mark.skipif(not device.ON_CPU, reason="a GPU engine shares no such memory")
def test_only_shared_memory_of_this_job_and_its_killed_runs_is_removed(monkeypatch):
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    monkeypatch.setattr(_CPUSHMDistributed, "make_group_name", None)
    paths = []
    for job, ranks, rank in [("90", [2, 3], 1), ("90", [2, 3], 0), ("90", [0, 1], 1), ("91", [2, 3], 1)]:
        patches.name_shared_memory(job)
        group = SimpleNamespace(unique_name="tp:0", ranks=ranks)
        paths.append(Path(f"/dev/shm/{_CPUSHMDistributed.make_group_name(group)}_{rank}"))  # as vLLM's C++ has it
        paths[-1].touch()
    try:
        start.unlink_shared_memory("90", range(2, 4), 1)
        assert [path.exists() for path in paths] == [False, True, True, True]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def test_engine_model_is_imported_in_this_process(tmp_path):
    from vllm import ModelRegistry

    (tmp_path / "config.json").write_text('{"architectures": ["Unknown", "Qwen3ForCausalLM"]}')
    start.import_engine_model(str(tmp_path))
    assert ModelRegistry.models["Qwen3ForCausalLM"].model_cls.__name__ == "Qwen3ForCausalLM"
    assert "Unknown" not in ModelRegistry.models


def test_one_adapter_is_applied_to_all_tokens_as_vllm_applies_it_to_each():
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    wrapper = PunicaWrapperCPU(64, 8, "cpu", lora_config=None)
    wrapper._token_lora_indices.zero_()  # every token's adapter is the first
    wrapper.indices_len[0], wrapper.is_prefill = 5, False
    torch.manual_seed(0)
    x, base, sizes = torch.randn(5, 12), torch.randn(5, 14), (8, 4, 2)
    a = [torch.randn(1, 1, 3, 12) for _ in sizes]  # [1, 1, R, D]
    b = [torch.randn(1, 1, size, 3) for size in sizes]  # [1, 1, size, R]
    theirs, ours = base.clone(), base.clone()
    wrapper.add_lora_linear(theirs, x, a, b, 1.0, sizes)
    manager = SimpleNamespace(punica_wrapper_mapping={"language_model": wrapper})
    patches.apply_adapter_at_once(SimpleNamespace(lora_manager=manager))
    wrapper.add_lora_linear(ours, x, a, b, 1.0, sizes)
    assert not torch.equal(ours, base)
    torch.testing.assert_close(ours, theirs)
    assert wrapper.add_lora_linear is patches._add_lora_linear
