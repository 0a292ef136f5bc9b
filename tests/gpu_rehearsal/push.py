"""An engine to push weights into: modules with vLLM's names and shapes, fused as on a GPU, which compute nothing."""

from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from torchtitan_rl.sync.engine_weights import EXPERTS, Shapes
from torchtitan_rl.sync.in_process import InProcess
from torchtitan_rl.sync.weight_sync import WeightSync
from torchtitan_rl.trainer.trainer import Trainer

FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
BY_COLUMNS = "o_proj", "down_proj"
"""Layers that tensor parallelism splits by their inputs."""


def engine_model(shapes: Shapes, *, degree: int, head_dim: int, dtype: torch.dtype, device: str) -> nn.Module:
    """Returns what a rank of an engine has of a Qwen3 with these full tensors, zeros. Its vocabulary is padded to a multiple of 64."""
    root, layers = nn.Module(), {}  # path of a layer -> its rows by tensor, and its columns
    root.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    for name, (rows, columns) in shapes.items():
        path, _, last = name.removesuffix(".weight").rpartition(".")
        if ".experts." in name:
            experts = layers.setdefault(f"{path.partition('.experts')[0]}.experts", {})
            experts[last] = experts.get(last, (0,))[0] + 1, rows, columns
            continue
        if last in BY_COLUMNS:
            columns //= degree
        elif last in FUSED:
            rows = max(rows // degree, head_dim) if last in "k_proj v_proj" else rows // degree
        elif last in ("embed_tokens", "lm_head"):
            rows = -(-rows // 64) * 64 // degree
        layer = layers.setdefault(f"{path}.{FUSED.get(last, last)}".strip("."), {})
        layer[last] = rows, columns
    for path, parts in layers.items():
        if path.endswith(".experts"):
            module = _experts(parts, degree, dtype, device)
        else:
            module, heights = nn.Module(), [rows for rows, _ in parts.values()]
            columns = next(iter(parts.values()))[1]
            size = (sum(heights),) if columns == 1 else (sum(heights), columns)
            module.weight = nn.Parameter(torch.zeros(size, dtype=dtype, device=device), requires_grad=False)
            module.output_partition_sizes = heights
        _put(root, path, module)
    return root


def _experts(parts: Mapping[str, tuple[int, int, int]], degree: int, dtype: torch.dtype, device: str) -> nn.Module:
    number, height, width = parts["gate_proj"]
    sizes = {"w13_weight": (number, 2 * height // degree, width), "w2_weight": (number, width, height // degree)}
    module = nn.Module()
    for name in EXPERTS:
        module.register_parameter(name, nn.Parameter(torch.zeros(sizes[name], dtype=dtype, device=device), False))
    module.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=None))
    return module


def _put(root: nn.Module, path: str, module: nn.Module) -> None:
    *parents, last = path.split(".")
    for part in parents:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    root.add_module(last, module)


def stand_in(model: nn.Module, degree: int, dtype: torch.dtype) -> SimpleNamespace:
    """Returns what a push asks of a `Generator` with this model. vLLM's own loading does nothing."""

    def collective_rpc(method: str, kwargs: dict) -> None:
        assert method == "reload_weights"
        for _ in kwargs["weights_iterator"]:
            pass

    replica, rank = divmod(dist.get_rank(), degree)
    llm = SimpleNamespace(collective_rpc=collective_rpc, reset_prefix_cache=lambda: True)
    return SimpleNamespace(
        inspect=lambda function: function(model), config=SimpleNamespace(tensor_parallel_degree=degree), dtype=dtype,
        rank_in_replica=rank, replica=replica, num_replicas=dist.get_world_size() // degree, wide_head=None,
        wake_weights=lambda: None, wake=lambda version: None, llm=llm,
    )  # fmt: skip


def connected(trainer: Trainer, degree: int) -> WeightSync:
    """Returns a sync with an engine of this tensor parallelism. vLLM would load its first push."""

    def connect(lora: None, shapes: Shapes) -> InProcess:
        head_dim = trainer.model.config.first_attention.head_dim
        sizes = {"degree": degree, "head_dim": head_dim, "dtype": torch.bfloat16, "device": "cuda"}
        return InProcess(stand_in(engine_model(shapes, **sizes), degree, torch.bfloat16), lora, shapes)

    sync = WeightSync.Config(check_interval=0).build(trainer=trainer, connect=connect, probe=np.arange(5, 60))
    sync._check_probe = lambda **_: None  # of the first push: the engine computes nothing
    return sync
