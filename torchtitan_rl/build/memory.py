"""Estimates the GPU memory that a config needs, before anything is started."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_rl.checksum import GPU_BLOCK
from torchtitan_rl.errors import UserError
from torchtitan_rl.fields.lora_config import is_adapter
from torchtitan_rl.models import hf_architecture, spec_from_folder
from torchtitan_rl.models.logprobs import GPU_TILE
from torchtitan_rl.models.lora.adapters import Lora
from torchtitan_rl.run.out_of_memory import usable_bytes
from torchtitan_rl.sync.lora_engine import room_for
from torchtitan_rl.trainer.model_loader import meta_model

if TYPE_CHECKING:
    from torchtitan_rl.config import RunConfig

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2}
CONTEXT_BYTES = 2 * GIB
"""CUDA's own memory, cuBLAS workspaces, and the engine's CUDA graphs, which stay while it sleeps. On several GPUs NCCL has 0.4 GiB a
group of ranks besides."""

STATE = "weights, moments and gradients"
"""The trainer's float32 state. Only more GPUs reduce it."""

ACTIVATION_SHARE = {"none": 1.0, "selective": 0.6, "full": 0.0, "auto": 0.0}
"""Share of a layer's inner activations that is kept until the backward pass. "auto" counts as what it may fall back to."""

ROOMY = 0.85
"""Share of a GPU up to which the estimate may choose a setting that takes more memory. The rest is for its error."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes on each GPU by use: while the engine is awake, and at the peak of an update."""

    awake: dict[str, float]
    updating: dict[str, float]

    @property
    def peak(self) -> float:
        """The larger of the two, in bytes."""
        return max(sum(self.awake.values()), sum(self.updating.values()))

    def describe(self) -> str:
        """Both in GiB, with their parts.

        Example: "engine awake 40.2 GiB (weights and moments 6.7, engine 31.6, CUDA 2.0); update 21.0 GiB (...)"
        """
        return f"engine awake {_in_gib(self.awake)}; update {_in_gib(self.updating)}"


def _in_gib(parts: dict[str, float]) -> str:
    each = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
    return f"{sum(parts.values()) / GIB:.1f} GiB ({each})"


def gpu_memory_bytes() -> int | None:
    """Total memory of this rank's GPU; None without a GPU. Creates no CUDA context, so the device need not be set yet."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0"))).total_memory


def teacher_spec(config: "RunConfig") -> ModelSpec | None:
    """The teacher's architecture; None without a teacher, or if its folder is not there yet. The policy's, if it teaches itself."""
    if config.teaches_itself:
        return config.model_spec
    folder = Path(config.teacher)
    return (
        spec_from_folder(folder) if config.teacher and (folder / "config.json").is_file() else None
    )


def fsdp_shards(config: "RunConfig", world_size: int) -> int:
    """The ranks over which FSDP shards."""
    p = config.trainer.parallelism
    if p.data_parallel_shard_degree >= 1:
        return p.data_parallel_shard_degree
    return max(1, world_size // (p.tensor_parallel_degree * p.data_parallel_replicate_degree))


def memory_need(config: "RunConfig", *, world_size: int, gpu_bytes: int) -> MemoryNeed:
    """Estimate the memory of each of `world_size` GPUs with `gpu_bytes`, to about a tenth. Left out is what takes less than a
    twentieth: NCCL's buffers, and the tiles of an exact divergence.

    The trainer keeps float32 weights and two moments, 12 bytes per parameter over the ranks that share them, and gradients of 4
    bytes during an update. A reference policy adds 4, a teacher those of the forward's dtype. The engine has its configured share of the GPU. With LoRA all this is
    of the adapters alone, the base has the forward's dtype, and the reference is the base. vLLM keeps the tensors of a push
    beside the buffers in its share, until the next push has replaced them.
    """
    shape, trainer = _Shape.of(config.model_spec), config.trainer
    p = trainer.parallelism
    tp, width = p.tensor_parallel_degree, BYTES[trainer.mixed_precision_param]
    shards = fsdp_shards(config, world_size)
    state = shape.parameters / (shards * tp)
    algorithm = config.algorithm.build(max_completion_tokens=config.sampling.max_tokens)
    reference = 4 * state if algorithm.needs_reference else 0
    frozen, trained, pushed = 0.0, state, {}
    if trainer.lora.rank:
        frozen, reference = state * width, 0
        parameters, exported = _adapter_sizes(config)
        trained = parameters / (shards * tp)
        pushed = {"pushed adapter": exported * BYTES[config.generator.dtype]}
    teacher = teacher_spec(config)
    is_base = trainer.lora.rank > 0 and config.teacher == config.hf_assets_path
    if config.teaches_itself:
        exact = algorithm.policy_loss.divergence_beta is not None
        copied = config.teacher_rate < 1 and (
            config.teacher_rate > 0 or exact or not trainer.lora.rank
        )
        frozen += copied * state * (4 if config.teacher_rate and not trainer.lora.rank else width)
    elif teacher is not None and not is_base:
        frozen += _Shape.of(teacher).parameters / (shards * tp) * width
    for folder in filter(Path.is_dir, map(Path, config.more_teachers.values())):
        frozen += _Shape.of(spec_from_folder(folder)).parameters / (shards * tp) * width
    engine = config.generator.gpu_memory_utilization * gpu_bytes * config.needs_engine
    largest = max(shape.embedding, shape.layer)
    awake = {
        "weights and moments": 12 * trained + frozen + reference,
        "engine": engine,
        "weight sync": _sync_bytes(shape, BYTES[config.generator.dtype], shards=shards, tp=tp),
        "CUDA": CONTEXT_BYTES,
        **{name: 2 * size for name, size in pushed.items()},  # the new one and the one before
    }
    tokens = trainer.max_tokens_per_microbatch
    chunk = min(trainer.logprob_chunk_tokens, tokens)
    rows = min(shape.vocabulary / tp, GPU_TILE / chunk)
    kept = shape.layers * (
        shape.dim + ACTIVATION_SHARE[trainer.activation_checkpoint] * shape.layer_activations
    )
    layer = shape.layer - shape.experts * (
        1 - 1 / p.expert_parallel_degree
    )  # a rank's own experts are not gathered
    gathered = (
        2 * layer + shape.vocabulary_matrices * shape.embedding,
        max(shape.embedding, layer),
    )  # weights and gradients that exist at one time
    if p.fsdp_reshard_after_forward == "never":
        gathered = shape.parameters, shape.parameters
    updating = {
        STATE: 16 * trained + frozen + reference,
        "gathered weights": gathered[0] * width / tp,
        "gathered gradients": (gathered[1] * 4 + largest * width) / tp * trained / state,
        "activations": tokens * (kept + shape.layer_activations) * width / tp,
        "log-probabilities": chunk * rows * (8 + width) + 8 * (tokens + rows) * shape.dim,
        "CUDA": CONTEXT_BYTES,
        **pushed,
    }
    if not config.generator.sleep:
        updating["engine"] = engine
    return MemoryNeed(awake, updating)


def _adapter_sizes(config: "RunConfig") -> tuple[int, int]:
    """Returns the adapters' parameters, and the elements of their exported tensors: a fused A has three names."""
    adapted = meta_model(config.model_spec, Lora(config.trainer.lora)).named_parameters()
    sizes = [
        (p.numel(), 3 if ".wqkv.lora_a." in name else 1) for name, p in adapted if is_adapter(name)
    ]
    return sum(size for size, _ in sizes), sum(size * names for size, names in sizes)


def _sync_bytes(shape: "_Shape", width: int, *, shards: int, tp: int) -> float:
    """Bytes on top of the weights while they are pushed: gathered matrices, or a block of the proof's checksums.

    A gather of the largest matrix also holds this rank's cast shard and, between the two gathers of FSDP x TP, the
    tensor-parallel share. The embedding is kept until the first layer is there, which FSDP gathers into a buffer of its own.
    """
    largest, ranks = max(shape.embedding, shape.layer), shards * tp
    gathered = largest * (1 + (1 / tp if tp > 1 else 0) + (1 / ranks if ranks > 1 else 0))
    with_layer = shape.embedding + shape.layer * (2 if shards > 1 else 1)
    return max(max(gathered, with_layer) * width, min(largest, GPU_BLOCK) * (8 + width))


def choose_by_memory(config: "RunConfig", *, world_size: int, gpu_bytes: int | None) -> str:
    """Set trainer.activation_checkpoint and generator.sleep if they are "auto". Returns a line that says what a run has.

    The engine stays awake, and fewer activations are recomputed, if the estimated peak is at most ROOMY of the GPU.
    Recomputation is given up first, because it takes a quarter of an update. Without a GPU, nothing changes.
    """
    if gpu_bytes is None:
        return ""
    generator, trainer = config.generator, config.trainer

    def need() -> MemoryNeed:
        return memory_need(config, world_size=world_size, gpu_bytes=gpu_bytes)

    if trainer.activation_checkpoint == "auto":
        for trainer.activation_checkpoint in ("none", "selective", "full"):
            if need().peak <= ROOMY * gpu_bytes:
                break
    if generator.sleep == "auto":
        generator.sleep = False
        generator.sleep = need().peak > ROOMY * gpu_bytes
    estimate = f"memory of each GPU of {gpu_bytes / GIB:.0f} GiB, estimated: {need().describe()}."
    if not config.needs_engine:
        return (
            f"{estimate} trainer.activation_checkpoint {trainer.activation_checkpoint}; no engine"
        )
    weights, cached = _engine_bytes(config)
    room = generator.gpu_memory_utilization * gpu_bytes - weights
    return (
        f"{estimate} trainer.activation_checkpoint {trainer.activation_checkpoint}, generator.sleep {generator.sleep}; the KV cache holds "
        f"about {max(room, 0) / cached:,.0f} tokens, {generator.max_num_seqs} sequences of full length need "
        f"{generator.max_num_seqs * generator.max_model_len:,}"
    )


def machine_memory(config: "RunConfig", *, world_size: int) -> str:
    """A line that says, without a GPU, what the ranks need of this machine's memory in an update, and what it has."""
    parts = memory_need(config, world_size=world_size, gpu_bytes=0).updating
    parts = {name: size for name, size in parts.items() if name not in ("engine", "CUDA")}
    if config.needs_engine:
        parts["engine's weights"] = _engine_bytes(config)[0]
        parts["KV cache"] = GIB * float(os.environ.get("VLLM_CPU_KVCACHE_SPACE") or 1)
    needed = world_size * sum(parts.values())
    line = f"memory of this machine {usable_bytes() / GIB:.0f} GiB, there is no GPU; estimated for each rank besides Python: {_in_gib(parts)}."
    if needed <= usable_bytes():
        return line
    lower = "trainer.max_tokens_per_microbatch or VLLM_CPU_KVCACHE_SPACE, start fewer ranks, or take a smaller model"
    return f"{line}\nwarning: {world_size} of them need {needed / GIB:.0f} GiB. Lower {lower}."


def _engine_bytes(config: "RunConfig") -> tuple[float, float]:
    """Bytes of an engine's weights, and of one token in its KV cache, on each of its ranks."""
    width, cached = BYTES[config.generator.dtype], _cached_values(config)
    degree = config.generator.tensor_parallel_degree
    parameters, rank = _Shape.of(config.model_spec).parameters, config.trainer.lora.rank
    if rank:  # the buffers have room for the next larger of vLLM's ranks
        parameters += _adapter_sizes(config)[1] * room_for(rank) / rank
    return width * parameters / degree, width * cached / degree


def _cached_values(config: "RunConfig") -> int:
    """Numbers of one token in a KV cache: its keys and values in all layers."""
    shape = hf_architecture(config.model_spec.model)
    return 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]


def check_memory(config: "RunConfig", *, world_size: int, gpu_bytes: int) -> None:
    """Check that the engine's weights and the trainer's float32 state fit GPUs of `gpu_bytes`.

    `memory_warning` handles the rest of `memory_need`, which is only an estimate.

    Raises:
        UserError: with the bytes and the fields to change.
    """
    degree, (weights, _) = config.generator.tensor_parallel_degree, _engine_bytes(config)
    if config.needs_engine and weights >= config.generator.gpu_memory_utilization * gpu_bytes:
        raise UserError(
            f"generator.gpu_memory_utilization {config.generator.gpu_memory_utilization} of {gpu_bytes / GIB:.0f} GiB does "
            f"not hold the engine's weights, {weights * degree / GIB:.1f} GiB over generator.tensor_parallel_degree "
            f"{degree}; raise either."
        )
    state = memory_need(config, world_size=world_size, gpu_bytes=gpu_bytes).updating[STATE]
    if state > gpu_bytes:
        raise UserError(
            f"{config.model_spec.name} {config.model_spec.flavor}{' with its teacher' * bool(config.teacher)} on {world_size} GPUs of {gpu_bytes / GIB:.0f} GiB cannot fit: "
            f"its {STATE} take {state / GIB:.1f} GiB on each. Start more GPUs (NGPU, NNODES)."
        )


def memory_warning(config: "RunConfig", *, world_size: int, gpu_bytes: int | None) -> str:
    """A warning with the estimated peak and its parts if it exceeds `gpu_bytes`; "" if it fits, or without a GPU."""
    if gpu_bytes is None:
        return ""
    need = memory_need(config, world_size=world_size, gpu_bytes=gpu_bytes)
    if need.peak <= gpu_bytes:
        return ""
    return (
        f"warning: {need.peak / GIB:.1f} GiB are computed for each GPU of {gpu_bytes / GIB:.0f} GiB: {need.describe()}. 0.6B "
        "took 5 % more than its estimate, larger models are not measured. If memory runs out, start more GPUs (NGPU, NNODES), "
        "or lower generator.gpu_memory_utilization, "
        "trainer.max_tokens_per_microbatch or trainer.logprob_chunk_tokens, or set trainer.activation_checkpoint full."
    )


@dataclass(frozen=True)
class _Shape:
    """Sizes of a decoder: parameters, and values per token."""

    parameters: int
    """Parameters of the whole model; tied ones once."""
    layers: int
    dim: int
    vocabulary: int
    embedding: int
    """Parameters of the embedding; the output head has as many."""
    vocabulary_matrices: int
    """1 with tied embeddings, otherwise 2."""
    layer: float
    """Parameters of one layer."""
    experts: float
    """Those of its experts; 0 in a dense model."""
    layer_activations: int
    """Values that one layer computes for a token and the backward pass reads."""

    @classmethod
    def of(cls, spec: ModelSpec) -> "_Shape":
        """Returns the sizes of a model, from its architecture and its parameters on meta."""
        a = hf_architecture(spec.model)
        dim, hidden, layers = (
            a["hidden_size"],
            a.get("intermediate_size", 0),
            a["num_hidden_layers"],
        )
        inner = 3 * hidden  # gate, up, product
        if (
            "num_experts" in a
        ):  # those of a token's experts, their inputs and outputs, and the routers' probabilities
            of_experts = a["num_experts_per_tok"] * (3 * a["moe_intermediate_size"] + 2 * dim)
            inner = max(inner, of_experts + a["num_experts"])
        embedding, matrices = a["vocab_size"] * dim, 1 if a["tie_word_embeddings"] else 2
        queries = a["num_attention_heads"] * a["head_dim"]
        projected = queries + 2 * a["num_key_value_heads"] * a["head_dim"]
        parameters = sum(p.numel() for p in meta_model(spec).parameters())
        return cls(
            parameters=parameters,
            layers=layers,
            dim=dim,
            vocabulary=a["vocab_size"],
            embedding=embedding,
            vocabulary_matrices=matrices,
            layer=(parameters - matrices * embedding) / layers,
            experts=3 * dim * a.get("num_experts", 0) * a.get("moe_intermediate_size", 0),
            # two norms and the residual; projections before and after norm and rotation; attention; MLP
            layer_activations=3 * dim + 2 * projected + queries + inner,
        )
