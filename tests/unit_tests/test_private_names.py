"""The private names of torch, torchtitan and vLLM that this package depends on: each is still where it was."""

import ast
import dataclasses
import importlib
import inspect
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torchtitan_rl"
MAY_REPLACE = ("device.py", "generator/patches.py")


class Private(NamedTuple):
    name: str
    """module:attribute, module:Class.attribute, or module:Class#attribute for one that only instances have."""
    files: str
    """Below torchtitan_rl/, separated by ", "."""
    reason: str
    replaces: bool = False
    """Whether the package puts something of its own in its place."""


ENGINE = "vllm.v1.engine.llm_engine:LLMEngine"
NAMES = [
    Private("torch._utils:_get_available_device_type", "device.py", "torchtitan reads its device from it and falls back to CUDA", True),
    Private("torch._C:_accelerator_setAllocatorSettings", "trainer/host_adamw.py", "pinned tensors take their own size, not the next power of two"),
    Private("torchtitan.components.optimizer:OptimizersContainer._resolve_optimizer_factory", "trainer/host_adamw.py", "names the class of the optimizer"),
    Private("torch.distributed.tensor:DTensor.__create_chunk_list__", "sync/shard_checksums.py", "where a shard begins"),
    Private("torch.distributed.checkpoint._nested_dict:set_element", "run/safe_load.py", "puts a loaded value into its place"),
    Private("torch.distributed.checkpoint.filesystem:_StorageInfo", "run/safe_load.py", "in the index of a checkpoint"),
    Private("torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING", "run/safe_load.py", "in the index of a checkpoint"),
    Private("torch.serialization:_get_layout", "run/safe_load.py", "in the index of a checkpoint"),
    Private("torchtitan.models.common.attention:FusedQKVLinear._split_qkv_on_save", "models/hf.py", "splits query, key and value without gathering them in float32"),
    Private("torchtitan.components.lora:_get_lora_cls#_lora_scaling", "models/lora/adapters.py, models/lora/lora_layers.py", "turns adapters off for the reference"),
    Private("transformers.modeling_utils:PreTrainedModel._init_weights", "models/hf_decoder.py", "computes a model's buffers, as `from_pretrained` does"),
    Private("transformers.modeling_utils:PreTrainedModel._from_config", "models/hf_decoder.py", "builds a model of the policy's own classes"),
    Private(f"{ENGINE}#logger_manager", "generator/patches.py", "statistics without Prometheus", True),
    Private(f"{ENGINE}#output_processor", "generator/patches.py", "gets the run's tokenizer", True),
    Private("vllm.v1.engine.input_processor:InputProcessor#structured_outputs_config", "generator/patches.py", "a grammar is checked where it is made", True),
    Private("vllm.v1.structured_output:StructuredOutputManager#backend", "generator/patches.py", "compiles grammars", True),
    Private(f"{ENGINE}#engine_core", "generator/patches.py", "to count cached blocks, and to stop the engine"),
    Private("vllm.v1.engine.output_processor:OutputProcessor#request_states", "generator/patches.py", "unfinished requests, with their tokens"),
    Private("vllm.v1.engine.output_processor:RequestState.make_request_output", "generator/patches.py", "the tokens so far"),
    Private("vllm.v1.core.block_pool:BlockPool#cached_block_hash_to_block", "generator/patches.py", "counts cached blocks"),
    Private("vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase#moe_kernel", "generator/patches.py", "lets a CPU engine's reload pack experts anew", True),
    Private("vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.isa", "generator/patches.py", "names the packing of experts on a CPU"),
    Private("vllm._custom_ops:cpu_prepack_moe_weight", "generator/patches.py", "packs row and column numbers, which shows how to unpack experts"),
    Private("vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed", "generator/patches.py", "has the function below"),
    Private("vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed.make_group_name", "generator/patches.py", "names the memory that a CPU engine's ranks share", True),
    Private("vllm._custom_ops:causal_conv1d_weight_pack", "generator/patches.py", "the same for convolutions"),
    Private("vllm.model_executor.layers.fused_moe.routed_experts_capturer:bind_routed_experts_capturer", "generator/patches.py", "lets a CPU engine's routers say what they chose"),
    Private("vllm.v1.worker.gpu_worker:Worker#model_runner", "generator/patches.py", "what the sampler and the routers did"),
    Private("vllm.v1.worker.gpu_model_runner:GPUModelRunner#sampler", "generator/patches.py", "records the tokens that it keeps", True),
    Private("vllm.v1.worker.gpu_input_batch:InputBatch#req_ids", "generator/patches.py", "the requests in a CPU engine's batch"),
    Private("vllm.v1.worker.gpu_input_batch:InputBatch#num_tokens_no_spec", "generator/patches.py", "the token that each row of the batch reads"),
    Private("vllm.v1.worker.gpu.states:RequestState#index_to_req_id", "generator/patches.py", "the requests in a GPU engine's batch"),
    Private("vllm.forward_context:ForwardContext#slot_mapping", "generator/patches.py", "the slots of the tokens that a CPU engine reads"),
    Private("vllm.v1.worker.gpu_model_runner:GPUModelRunner#requests", "generator/patches.py", "the blocks of a CPU engine's request"),
    Private("vllm.v1.worker.gpu_model_runner:GPUModelRunner#input_batch", "generator/patches.py", "whether a CPU engine's request is in the batch"),
    Private("vllm.v1.worker.gpu_input_batch:CachedRequestState#block_ids", "generator/patches.py", "the blocks of a CPU engine's request"),
    Private("vllm.v1.worker.gpu_input_batch:InputBatch#req_id_to_index", "generator/patches.py", "whether a CPU engine's request is in the batch"),
    Private("vllm.ir.op:IrOpImpl#supported", "generator/patches.py", "lets a CPU engine use a kernel", True),
    Private("vllm.ir.op:IrOpImpl#impl_fn", "generator/patches.py", "gives that kernel contiguous tensors", True),
    Private("vllm.lora.model_manager:LoRAModelManager#model.lora_manager", "sync/lora_engine.py, generator/patches.py", "replaces the adapter in process"),
    Private("vllm.lora.model_manager:LoRAModelManager#modules", "generator/patches.py", "the engine's adapted layers"),
    Private("vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA#lora_a_stacked", "generator/patches.py", "the buffer of an adapter, for its checksum"),
]  # fmt: skip


def is_there(private: Private) -> bool:
    """Whether the installed version has the name."""
    module, _, path = private.name.partition(":")
    path, _, of_instances = path.partition("#")
    try:
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return False
    if not of_instances:
        return True
    if inspect.isfunction(found):  # one that makes the class
        return f"self.{of_instances}" in inspect.getsource(found)
    fields = [field.name for field in dataclasses.fields(found)] if dataclasses.is_dataclass(found) else []
    return of_instances in fields or of_instances in vars(found) or any(
        f"self.{of_instances}" in inspect.getsource(one) for one in found.__mro__[:-1] if one.__module__.startswith(("torch", "vllm"))
    )  # fmt: skip


def last_part(private: Private) -> str:
    return private.name.replace("#", ".").rsplit(".", 1)[-1].rsplit(":", 1)[-1]


def imported() -> set[str]:
    """Names with an underscore that the package imports from torch, torchtitan and vLLM, as module:name."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            package = (getattr(node, "module", None) or "").split(".")[0]
            if isinstance(node, ast.ImportFrom) and package in ("torch", "torchtitan", "vllm"):
                names = [f"{node.module}:{alias.name}" for alias in node.names]
                found |= {name for name in names if "._" in name or ":_" in name}
    return found


@pytest.mark.parametrize("private", NAMES, ids=lambda private: private.name)
def test_private_name_is_where_it_was_and_used_where_it_is_listed(private: Private):
    assert is_there(private), (
        f"{private.name} is not where it was: the installed version has moved it. torchtitan_rl/{private.files} uses it "
        f"({private.reason})."
    )
    for file in private.files.split(", "):
        assert last_part(private) in (PACKAGE / file).read_text(), f"{file} does not use {private.name} any more"


def test_every_private_import_is_listed():
    assert imported() <= {private.name for private in NAMES}


def test_only_device_and_patches_replace_behaviour():
    others = [p.name for p in NAMES if p.replaces and not all(f.startswith(MAY_REPLACE) for f in p.files.split(", "))]
    assert others == []


def test_moved_private_name_is_reported():
    assert not is_there(Private(f"{ENGINE}._gone", "", ""))
    assert not is_there(Private(f"{ENGINE}#_gone", "", ""))
    assert not is_there(Private("torch.gone:_name", "", ""))
