"""Estimates the memory that a config needs, before anything is started: a count on the meta device, and bytes a parameter and token."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_rl import PLANNED_GIB
from torchtitan_rl.errors import UserError
from torchtitan_rl.models.hf_config import hf_architecture, spec_from_folder
from torchtitan_rl.models.logprobs import GPU_TILE
from torchtitan_rl.models.lora.adapters import Lora
from torchtitan_rl.models.lora.lora_config import is_adapter
from torchtitan_rl.sync.checksum import GPU_BLOCK
from torchtitan_rl.sync.lora_engine import room_for
from torchtitan_rl.trainer.model_loader import meta_model
from torchtitan_rl.trainer.optimizer import AdamW

if TYPE_CHECKING:
    from torchtitan_rl.algorithm import Algorithm
    from torchtitan_rl.config import RunConfig

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2, "auto": 2}
"""Bytes of a value. "auto" counts as on a GPU."""
CONTEXT = {"CUDA": 2.0 * GIB}
"""CUDA's own memory, cuBLAS workspaces, and the engine's CUDA graphs, which stay while it sleeps. On several GPUs NCCL has 0.4 GiB a
group of ranks besides."""

STATE = "trainer's state"
"""Weights, in an update gradients, and the moments that are not on the host. Only more GPUs reduce it further."""

ACTIVATION_SHARE = {"none": 1.0, "selective": 0.6, "full": 0.0, "auto": 0.0}
"""Share of a layer's inner activations that is kept until the backward pass. "auto" counts as what it may fall back to."""

ROOMY = 0.85
"""Share of a GPU up to which the estimate may choose a setting that takes more memory. The rest is for its error."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes on each GPU, or on each rank of a machine without one, by use."""

    awake: dict[str, float]
    """While the engine is awake."""
    updating: dict[str, float]
    """At the peak of an update."""
    sampling: dict[str, float]
    """On ranks that only sample; empty without such."""
    on_host: dict[str, float]
    """Bytes of the host's memory for each GPU."""

    @property
    def peak(self) -> float:
        """The larger of `awake` and `updating`, in bytes."""
        return max(sum(self.awake.values()), sum(self.updating.values()))

    def describe(self) -> str:
        """All in GiB, with their parts.

        Example: "engine awake 40.2 GiB (trainer's state 6.7, engine 31.6, CUDA 2.0); update 21.0 GiB (...)"
        """
        first = "engine awake" if self.awake.keys() & {"engine", "KV cache"} else "weight sync"
        text = f"{first} {_in_gib(self.awake)}; update {_in_gib(self.updating)}"
        if self.sampling:
            text += f"; a rank that only samples {_in_gib(self.sampling)}"
        return text


def _in_gib(parts: dict[str, float]) -> str:
    each = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)
    return f"{sum(parts.values()) / GIB:.1f} GiB ({each})"


def gpu_memory_bytes() -> int | None:
    """Total memory of this rank's GPU, or of one that is planned for; None without. Creates no CUDA context: no device need be set."""
    if PLANNED_GIB:
        return PLANNED_GIB * GIB
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


def parameter_count(spec: ModelSpec) -> int:
    """The parameters of a model, tied ones once."""
    return sum(p.numel() for p in meta_model(spec).parameters())


def fsdp_shards(config: "RunConfig", world_size: int) -> int:
    """The ranks over which FSDP shards."""
    p = config.trainer.parallelism
    if p.data_parallel_shard_degree >= 1:
        return p.data_parallel_shard_degree
    return max(1, world_size // (p.tensor_parallel_degree * p.data_parallel_replicate_degree))


def memory_need(
    config: "RunConfig", algorithm: "Algorithm", *, world_size: int, gpu_bytes: int
) -> MemoryNeed:
    """Estimate the memory of each of `world_size` GPUs with `gpu_bytes`, to about a tenth. Left out is what takes less than a
    twentieth: NCCL's buffers, and the tiles of an exact divergence.

    The trainer keeps float32 weights and two moments, 12 bytes per parameter over the ranks that share them, and gradients of 4
    bytes during an update. With LoRA these are of the adapters alone. Moments on the host take nothing: the few that a step reads
    come when a backward's memory is free. The engine has its configured share of the GPU. vLLM keeps the tensors of a push beside the
    buffers in its share, until the next push has replaced them.
    """
    shape, lora = _Shape.of(config.model_spec), config.trainer.lora.rank > 0
    tp = config.trainer.parallelism.tensor_parallel_degree
    shards = fsdp_shards(config, world_size)
    ranks, pushed = shards * tp, 0.0
    trained = shape.parameters / ranks
    if lora:
        adapters, exported = _adapter_sizes(config)
        trained, pushed = adapters / ranks, exported * BYTES[config.generator.dtype]
    frozen = _frozen_bytes(config, algorithm, shape) / ranks
    engine, own = _engine_need(config, algorithm, gpu_bytes), config.generator.ranks > 0
    context = CONTEXT if gpu_bytes else {}
    beside = {} if own else engine
    moments = 8 * trained * (config.trainer.optimizer.on_host is True and gpu_bytes > 0)
    awake = {
        STATE: 12 * trained - moments + frozen,
        **beside,
        "weight sync": _sync_bytes(shape, BYTES[config.generator.dtype], shards=shards, tp=tp),
        **context,
    }
    updating = {
        STATE: 16 * trained - moments + frozen,
        **_update_bytes(config, shape, trained_share=trained / (shape.parameters / ranks)),
        **context,
    }
    if lora:
        awake["pushed adapter"] = 2 * pushed  # the new one and the one before
        updating["pushed adapter"] = pushed
    if not (config.generator.sleep and gpu_bytes):
        updating |= beside
    asleep = _engine_bytes(config)[0] * bool(lora and beside and config.generator.sleep)
    on_host = {"moments": moments, "the engine's weights asleep": asleep}
    return MemoryNeed(awake, updating, engine | context if own else {}, on_host)


def _engine_need(config: "RunConfig", algorithm: "Algorithm", gpu_bytes: int) -> dict[str, float]:
    """Bytes of an engine that is awake on each of its ranks, by use."""
    if not config.needs_engine(algorithm):
        return {}
    if gpu_bytes:
        return {"engine": config.generator.gpu_memory_utilization * gpu_bytes}
    cache = GIB * float(os.environ.get("VLLM_CPU_KVCACHE_SPACE") or 1)
    return {"engine's weights": _engine_bytes(config)[0], "KV cache": cache}


def _frozen_bytes(config: "RunConfig", algorithm: "Algorithm", shape: "_Shape") -> float:
    """Bytes, on all ranks together, of the weights that no optimizer updates: LoRA's base, the reference, teachers.

    LoRA's base has the forward's dtype, and is the reference too. Without it the reference has float32. A teacher has the forward's
    dtype; one that is the policy itself is a copy, unless it is the policy of the step or LoRA's base.
    """
    width, lora = BYTES[config.trainer.mixed_precision_param], config.trainer.lora.rank > 0
    frozen = 0.0
    if lora:
        frozen += shape.parameters * width
    elif algorithm.needs_reference:
        frozen += shape.parameters * 4
    teacher, rate = teacher_spec(config), config.teacher_rate
    if config.teaches_itself:
        exact = algorithm.policy_loss.divergence_beta is not None
        if rate < 1 and (rate > 0 or exact or not lora):
            frozen += shape.parameters * (4 if rate and not lora else width)
    elif teacher is not None and not (lora and config.teacher == config.hf_assets_path):
        frozen += _Shape.of(teacher).parameters * width
    for folder in filter(Path.is_dir, map(Path, config.more_teachers.values())):
        frozen += _Shape.of(spec_from_folder(folder)).parameters * width
    return frozen


def _update_bytes(
    config: "RunConfig", shape: "_Shape", *, trained_share: float
) -> dict[str, float]:
    """Bytes of an update on each GPU besides the state, by use.

    Args:
        trained_share: share of the parameters that are trained; less than 1 with LoRA.
    """
    trainer, p = config.trainer, config.trainer.parallelism
    tp, width = p.tensor_parallel_degree, BYTES[trainer.mixed_precision_param]
    # A rank's own experts are not gathered.
    layer = shape.layer - shape.experts * (1 - 1 / p.expert_parallel_degree)
    weights = 2 * layer + shape.vocabulary_matrices * shape.embedding  # that exist at one time
    gradients = max(shape.embedding, layer)
    if p.fsdp_reshard_after_forward == "never":
        weights = gradients = shape.parameters
    largest = max(shape.embedding, shape.layer)
    tokens = trainer.max_tokens_per_microbatch
    chunk = min(trainer.logprob_chunk_tokens, tokens)
    rows = min(shape.vocabulary / tp, GPU_TILE / chunk)
    inner = ACTIVATION_SHARE[trainer.activation_checkpoint] * shape.layer_activations
    kept = shape.layers * (shape.dim + inner)  # values a token
    return {
        "gathered weights": weights * width / tp,
        "gathered gradients": (gradients * 4 + largest * width) / tp * trained_share,
        "activations": tokens * (kept + shape.layer_activations) * width / tp,
        "log-probabilities": chunk * rows * (8 + width) + 8 * (tokens + rows) * shape.dim,
    }


def checkpoint_bytes(config: "RunConfig") -> int:
    """Bytes of a checkpoint: float32 weights and two moments of what is trained, and the policy's average, if that teaches it."""
    trains_all = config.trainer.lora.rank == 0
    trained = parameter_count(config.model_spec) if trains_all else _adapter_sizes(config)[0]
    keeps_average = config.teaches_itself and 0 < config.teacher_rate < 1
    return (16 if keeps_average else 12) * trained


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


def _engine_bytes(config: "RunConfig") -> tuple[float, float]:
    """Bytes of an engine's weights, and of one token in its KV cache (its keys and values in all layers), on each of its ranks."""
    width, degree = BYTES[config.generator.dtype], config.generator.tensor_parallel_degree
    parameters, rank = _Shape.of(config.model_spec).parameters, config.trainer.lora.rank
    if rank:  # the buffers have room for the next larger of vLLM's ranks
        parameters += _adapter_sizes(config)[1] * room_for(rank) / rank
    a = hf_architecture(config.model_spec.model)
    cached = 2 * a["num_hidden_layers"] * a["num_key_value_heads"] * a["head_dim"]
    return width * parameters / degree, width * cached / degree


def choose_by_memory(
    config: "RunConfig", algorithm: "Algorithm", *, world_size: int, gpu_bytes: int | None
) -> None:
    """Set trainer.optimizer.on_host, trainer.activation_checkpoint and generator.sleep where they are "auto".

    The moments are on the host if the estimated peak is above the GPU's memory whatever else is chosen. Then the engine stays awake,
    and fewer activations are recomputed, if the peak is at most ROOMY of the GPU. Recomputation is given up first, because it takes a
    quarter of an update. Without a GPU all three stay what they were.
    """

    def choose(part: Any, field: str, choices: list[str | bool], share: float = ROOMY) -> None:
        """Set the first choice with which the estimate is at most this share of the GPU, or else the last."""
        for choice in choices if getattr(part, field) == "auto" else ():
            setattr(part, field, choice)
            on = {"world_size": world_size, "gpu_bytes": gpu_bytes}
            if memory_need(config, algorithm, **on).peak <= share * gpu_bytes:
                return

    if gpu_bytes is not None:
        optimizer, beside = config.trainer.optimizer, config.generator.ranks == 0
        choose(optimizer, "on_host", [False, True][: 1 + (type(optimizer) is AdamW.Config)], 1.0)
        choose(config.trainer, "activation_checkpoint", ["none", "selective", "full"])
        choose(config.generator, "sleep", [False, True][: 1 + beside])


def describe_memory(
    config: "RunConfig", algorithm: "Algorithm", *, world_size: int, gpu_bytes: int | None
) -> str:
    """Returns a line with the memory that a run takes of each GPU and what was chosen, and a warning if that is more than there
    is; without a GPU, a line with what each rank needs of this machine's memory.

    Raises:
        UserError: if the trainer's float32 state does not fit the GPUs: it is exact, and found out only after the engine's start.
    """
    on = {"world_size": world_size, "gpu_bytes": gpu_bytes or 0}
    need, generator = memory_need(config, algorithm, **on), config.generator
    weights, cached = _engine_bytes(config)
    if gpu_bytes is None:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
        line = f"memory of this machine {machine:.0f} GiB, there is no GPU; estimated for each rank besides Python: {need.describe()}"
        needed = world_size * need.peak + generator.ranks * sum(need.sampling.values())
        if needed / GIB > machine:
            line += (
                "\nwarning: that is more than this machine has. Use a smaller model, train adapters alone (--trainer.lora.rank 16), "
                "or run it on GPUs."
            )
        return line
    state, size = need.updating[STATE], f"{gpu_bytes / GIB:.0f} GiB"
    if state > gpu_bytes:
        raise UserError(
            f"{config.model_spec.name} {config.model_spec.flavor} on {world_size} GPUs of {size} cannot fit: its weights and "
            f"gradients{', with the moments' * (not need.on_host['moments'])}{', with the teacher' * bool(config.teacher)} take "
            f"{state / GIB:.1f} GiB on each. Start more GPUs (NGPU, NNODES), or train adapters alone (--trainer.lora.rank 32)."
        )
    chosen = f"trainer.activation_checkpoint {config.trainer.activation_checkpoint}"
    if config.needs_engine(algorithm):
        room = max(generator.gpu_memory_utilization * gpu_bytes - weights, 0) / cached
        engines = (generator.ranks or world_size) // generator.tensor_parallel_degree
        share = -(-config.num_prompts_per_step * config.sampling.n // engines)
        at_once = min(generator.max_num_seqs, share)
        chosen += (
            f", generator.sleep {generator.sleep}; the KV cache holds about {room:,.0f} tokens, an engine's {at_once} sequences "
            f"of a step need {at_once * generator.max_model_len:,} at full length"
        )
    line = f"memory of each GPU of {size}, estimated: {need.describe()}. {chosen}"
    if any(need.on_host.values()):
        line += f". The host's memory for each GPU: {_in_gib(need.on_host)}"
    if need.peak > gpu_bytes:
        line += (
            "\nwarning: that is more than the GPU has. 0.6B took 5 % more than its estimate, larger models are not measured. If memory "
            "runs out, start more GPUs (NGPU, NNODES), or lower generator.gpu_memory_utilization, trainer.max_tokens_per_microbatch or "
            "trainer.logprob_chunk_tokens, or set trainer.activation_checkpoint full."
        )
    return line


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
        dim, layers = a["hidden_size"], a["num_hidden_layers"]
        inner = 3 * a.get("intermediate_size", 0)  # gate, up, product
        if "num_experts" in a:  # a token's experts, their inputs and outputs; the routers' output
            experts = a["num_experts_per_tok"] * (3 * a["moe_intermediate_size"] + 2 * dim)
            inner = max(inner, experts + a["num_experts"])
        embedding, matrices = a["vocab_size"] * dim, 1 if a["tie_word_embeddings"] else 2
        queries = a["num_attention_heads"] * a["head_dim"]
        projected = queries + 2 * a["num_key_value_heads"] * a["head_dim"]
        parameters = parameter_count(spec)
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
