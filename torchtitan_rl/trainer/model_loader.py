"""Loads the policy and frozen models: torchtitan's model for this device, sharded over the ranks, with a head that scores tokens."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.tools.utils import set_default_dtype

from torchtitan_rl.device import DEVICE_TYPE, ON_CPU
from torchtitan_rl.models.attention import FlexPacked, attention_config
from torchtitan_rl.models.lora.adapters import Lora
from torchtitan_rl.trainer.trainer_config import TrainerConfig

RECOMPUTATION = {"selective": SelectiveAC.Config(), "full": FullAC.Config()}
"""By `TrainerConfig.activation_checkpoint`; the others recompute nothing."""


@dataclass(eq=False)
class ModelLoader:
    """Loads the policy and frozen models, sharded alike over the ranks."""

    config: TrainerConfig
    model_spec: ModelSpec
    folder: str
    """The start of the policy."""
    parallel_dims: ParallelDims
    max_model_len: int
    lora: Lora | None = None
    """The policy's adapters; None for none."""
    router_replay: bool = False
    """Whether the sampler's records are experts (`Generator.Config`)."""

    def __post_init__(self) -> None:
        self.state_dict_adapter = self.model_spec.state_dict_adapter(self.model_spec.model, None)
        # Kernels are compiled for each shape, so shapes must be few. Sequence parallelism splits the packed tokens.
        self.pad_multiple = 128 * self.parallel_dims.tp

    def attention_cost(self, model: Decoder) -> float:
        """The cost of attending to one token, relative to one token's other work, by torchtitan's count of FLOPs."""
        _, without_attention = self.model_spec.model.get_nparams_and_flops(model, 0)
        _, with_attention = self.model_spec.model.get_nparams_and_flops(model, 1)
        return with_attention / without_attention - 1

    def policy(self) -> Decoder:
        """Returns a sharded model with the start's weights, and with adapters if the policy has them. Collective."""
        return self._load(self.model_spec, self.folder, "float32", self.lora)

    def frozen(self, model_spec: ModelSpec, folder: Path) -> Decoder:
        """Returns another model with a folder's weights in the forward's dtype, sharded as the policy. Collective."""
        dtype = self.config.mixed_precision_param
        return self._load(model_spec, str(folder), dtype, None).requires_grad_(False)

    def _load(self, model_spec: ModelSpec, folder: str, dtype: str, lora: Lora | None) -> Decoder:
        config = self.config
        max_len = -(-self.max_model_len // self.pad_multiple) * self.pad_multiple
        architecture = model_config(model_spec, config, max_len)
        # A record has a bit for each row of the policy's head.
        same_rows = model_spec.model.vocab_size == self.model_spec.model.vocab_size
        architecture.lm_head.reads_records = same_rows and not self.router_replay
        if lora:
            architecture = lora.convert(architecture)
        with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[dtype]):
            model = architecture.build()
        forward_dtype = config.mixed_precision_param
        for parameter in model.parameters():
            if not parameter.requires_grad:
                # A base below adapters has the forward's dtype: no optimizer needs more digits of it.
                parameter.data = parameter.data.to(TORCH_DTYPE_MAP[forward_dtype])
        if config.compile:
            # KL, batches without a backward and selective checkpointing alone make 7 variants of a block; torch allows 8.
            torch.compiler.config.recompile_limit = 64
        model = model_spec.parallelize_fn(
            model,
            parallel_dims=self.parallel_dims,
            training=TrainingConfig(mixed_precision_param=forward_dtype),
            parallelism=config.parallelism,
            compile_config=CompileConfig(enable=config.compile, components=["model"]),
            ac_config=RECOMPUTATION.get(config.activation_checkpoint),
            dump_folder="",
        )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(ON_CPU)  # gloo has no pre-multiplied sum
                if not self.parallel_dims.dp_enabled:
                    # torchtitan's factor of 1 would divide, and so copy, every gradient.
                    module.set_gradient_divide_factor(None)
        model.to_empty(device=DEVICE_TYPE)
        with torch.no_grad():
            model.init_weights()  # makes the RoPE caches; weights have values when they are read
        model.train()
        load_hf_weights(model, model_spec.state_dict_adapter(model_spec.model, None), folder)
        return model


def model_config(model_spec: ModelSpec, config: TrainerConfig, max_len: int) -> Decoder.Config:
    """Returns a copy of the model's config for the trainer on this device, with RoPE for texts of up to `max_len` tokens."""
    layers = [replace(layer) for layer in model_spec.model.layers]
    architecture = replace(model_spec.model, layers=layers)
    inner = attention_config(float32=config.mixed_precision_param == "float32")
    if config.attention == "flex":
        inner = FlexPacked.Config()
    for layer in layers:
        rope = replace(layer.attention.rope, max_seq_len=max_len)
        layer.attention = replace(layer.attention, inner_attention=inner, rope=rope)
    compiles = not ON_CPU if config.compile_head == "auto" else config.compile_head
    architecture.lm_head = replace(
        architecture.lm_head, chunk_tokens=config.logprob_chunk_tokens, compile=compiles
    )
    architecture.update_from_config(config=config)  # sets how each part is sharded
    # The head reduces over the sharded vocabulary itself and returns plain tensors.
    architecture.lm_head.sharding_config = replace(
        architecture.lm_head.sharding_config, out_src_shardings=None, out_dst_shardings=None
    )
    return architecture


@torch.no_grad()
def load_hf_weights(
    model: Decoder, state_dict_adapter: BaseStateDictAdapter, hf_assets_path: str
) -> None:
    """Load a folder's safetensors into the sharded model. Each rank reads its shards."""
    state = state_dict_adapter.to_hf(model.state_dict())
    reader = state_dict_adapter.get_hf_storage_reader(hf_assets_path)
    dcp.load(state, storage_reader=reader)
    model.load_state_dict(state_dict_adapter.from_hf(state), strict=False)


def meta_model(model_spec: ModelSpec, lora: Lora | None = None, *, seq_len: int = 1) -> Decoder:
    """Returns the model without weights, in float32 and in one process on no device, for its names, shapes and modules.

    Args:
        lora: adds adapters.
        seq_len: the most tokens that it can score.
    """
    config = TrainerConfig(mixed_precision_param="float32", compile_head=False)
    set_spmd_backend(config.parallelism.spmd_backend)
    architecture = model_config(model_spec, config, seq_len)
    with torch.device("meta"):
        return (lora.convert(architecture) if lora else architecture).build()
