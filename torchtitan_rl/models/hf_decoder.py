"""Runs a decoder of transformers as the policy: its own layers, with packed attention, FSDP2 and the scoring head.

The model has torchtitan's parts (`tok_embeddings`, `layers`, `norm`, `lm_head`), which are transformers' modules under other
names. The forward is transformers' own, so each detail of a family is computed by the code that defines it.
"""

import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torchtitan.config import Configurable
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.qwen3 import parallelize_qwen3
from torchtitan.models.utils import get_dense_model_nparams_and_flops
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.module import ModuleDict
from torchtitan.protocols.sharding import ShardingConfig
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from torchtitan_rl.errors import expect
from torchtitan_rl.models.attention import PackedRows
from torchtitan_rl.models.linear_layers import LINEAR, check_linear, each_sequence, run_on_sequences
from torchtitan_rl.models.lora.lora_config import LoraConfig, is_adapter
from torchtitan_rl.models.lora.lora_layers import add_adapters
from torchtitan_rl.models.multimodal import TextReader

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


ATTENTION = "torchtitan_rl_packed"
"""The name of `packed_attention` among transformers' attention functions. Models with another name are not affected."""

HARMLESS = ("position_ids", "use_cache")
"""Options that models pass to their attention and that change nothing here."""

LONGER_WINDOWS = ("cohere2",)
"""Model types whose windows are one token longer in vLLM than in transformers: vllm/model_executor/models/commandr.py adds it."""

HALVES_IN_ENGINE = ("glm", "glm4")
"""Model types whose one matrix of gate and up is two matrices to vLLM's adapters, which cannot take its A and B."""

NAMES = {
    "tok_embeddings.": "model.embed_tokens.",
    "layers.": "model.layers.",
    "norm.": "model.norm.",
}
"""{beginning of a parameter's name here: in transformers}. The names of the output head are the same."""


class PackedCall(NamedTuple):
    """How one forward's attention is computed. Each attention module of the model calls it once."""

    masks: PackedRows | VarlenMetadata
    inner: dict[int | None, VarlenAttention]
    """The attention of each sliding window; None: of layers that attend to everything before."""

    def __call__(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        """q [1, T, N, H], k and v [1, T, Nkv, H] -> [1, T, N, H]"""
        options = {"scale": scale, "enable_gqa": q.shape[2] != k.shape[2]}
        return self.inner[window](q, k, v, attention_masks=self.masks, **options)

    def linear(self, forward: Callable[..., Tensor], hidden: Tensor) -> Tensor:
        """The `forward` of a linear layer, [1, T, D] -> [1, T, D], inside each sequence."""
        return each_sequence(forward, hidden, self.masks)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedCall,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers. query [1, N, T, H], key and value [1, Nkv, T, H] -> [1, T, N, H], None.

    transformers makes no `attention_mask` for it, and `dropout` is 0 in evaluation mode. `options` are HARMLESS ones. Others, and a
    model's own mask, are passed on, and `hf_support` refuses models that have them.
    """
    others: dict[str, Any] = {}
    for name, option in {"attention_mask": attention_mask, **options}.items():
        if option is not None and name not in HARMLESS and (name, option) != ("is_causal", True):
            others[name] = option
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))  # [1, T, N or Nkv, H]
    return packed(module, q, k, v, scale=scaling, window=sliding_window, **others), None


def build_transformers_model(config: "PretrainedConfig") -> "PreTrainedModel":
    """Returns transformers' model with packed attention, in evaluation mode, on torch's default device and in its dtype."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface

    AttentionInterface.register(ATTENTION, packed_attention)
    shared = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    own = getattr(_own_copy(shared.__module__), shared.__name__)
    options = {"attn_implementation": ATTENTION, "dtype": torch.get_default_dtype()}
    model = own._from_config(deepcopy(config), **options)
    for layer in linear_layers(model.base_model):
        run_on_sequences(layer)
    return model.eval()


def linear_layers(base: nn.Module) -> list[nn.Module]:
    """Returns the linear layers of a transformers' model without its head."""
    name = LINEAR.get(base.config.model_type, "")
    return [getattr(layer, name) for layer in base.layers if hasattr(layer, name)] if name else []


@cache
def _own_copy(name: str) -> ModuleType:
    """Imports a module of transformers a second time, so that changes to its classes affect the policy only.

    vLLM's Transformers backend replaces `__init__` and `__call__` of a family's class, for every instance in the process. A model
    that is built afterwards would fail.
    """
    spec = spec_from_file_location(f"{name}_of_policy", find_spec(name).origin)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # transformers looks up the module of a class
    spec.loader.exec_module(module)
    return module


class HFDecoder(Decoder):
    """A dense decoder of transformers with torchtitan's interface."""

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        """The inherited fields hold the sizes; `hf` alone decides what is computed."""

        hf: "PretrainedConfig | None" = None
        windows: tuple[int | None, ...] = ()
        """The sliding window of each layer, counting the token itself; None: no window."""
        logit_scale: float = 1.0
        """The constant by which the model multiplies its logits."""
        merged: tuple[str, ...] = ()
        """Matrices that hold several of vLLM's, such as gate_up_proj."""
        linear: int = 0
        """Layers with linear attention."""
        lora: LoraConfig | None = None
        """The adapters of its layers; None: all weights are trained."""
        part_of: str = ""
        """The architecture of the multimodal checkpoint whose text this is; "" for a checkpoint of its own."""

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Set what the head needs to know: the scale of the logits, and that it is whole on each rank."""
            check_parallelism(self, config.parallelism.tensor_parallel_degree)
            self.lm_head.scale = self.logit_scale
            self.lm_head.sharding_config = ShardingConfig()

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Returns the parameters and a token's operations, as if no layer had a window and no state."""
            attention = self.first_attention
            return get_dense_model_nparams_and_flops(
                model,
                len(self.layers) - self.linear,
                attention.n_heads,
                2 * attention.head_dim,
                seq_len,
                self.enable_weight_tying,
            )

    def __init__(self, config: Config) -> None:
        BaseModel.__init__(self)
        self.config = config
        base = build_transformers_model(config.hf).model
        if config.lora:
            add_adapters(base.layers, config.lora)
        self.tok_embeddings = base.embed_tokens
        self.layers = ModuleDict({str(i): layer for i, layer in enumerate(base.layers)})
        self.norm = base.norm
        self.lm_head = config.lm_head.build()
        self.enable_weight_tying = config.enable_weight_tying
        if self.enable_weight_tying:
            self.tok_embeddings.weight = self.lm_head.weight
        # Not a child: its parameters would have two names.
        self._base = (base,)
        attention = config.first_attention.inner_attention
        self._inner: dict[int | None, VarlenAttention] = {}
        for window in set(config.windows):
            own = attention if window is None else replace(attention, window_size=(window - 1, 0))
            self._inner[window] = own.build()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(config.lora is None or is_adapter(name))

    def train(self, mode: bool = True) -> "HFDecoder":
        """Stay in evaluation mode, in which no model has dropout: the sampler has none."""
        return super().train(False)

    @property
    def rounded(self) -> list[nn.Module]:
        """Modules inside the layers whose rounding errors add to those of the layers' outputs: see sync/probe.py."""
        parts = [part for layer in linear_layers(self._base[0]) for part in layer.children()]
        return [part for part in parts if isinstance(part, nn.Linear)]

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Tie the embeddings and compute the buffers (rotary frequencies, scales). Weights stay as they are."""
        if self.enable_weight_tying:
            self.tok_embeddings.weight = self.lm_head.weight
        base, device = self._base[0], self.lm_head.weight.device
        for module in base.modules():
            if not [*module.buffers(recurse=False)]:
                continue
            if not [*module.parameters(recurse=False)]:  # the others are on the device
                module.to_empty(device=device, recurse=False)
            base._init_weights(module)

    def forward(
        self, tokens: Tensor, positions: Tensor, attention_masks: PackedRows | VarlenMetadata
    ) -> Any:
        """tokens and positions [1, T] -> the head's result."""
        packed = PackedCall(attention_masks, self._inner)
        places = {"input_ids": tokens, "position_ids": positions}
        output = self._base[0].forward(**places, use_cache=False, packed=packed)
        return self.lm_head(output.last_hidden_state)


class HFStateDictAdapter(StateDictAdapter):
    """Only the parts' names change: see NAMES. The tensors are transformers' own."""

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> TextReader:
        """Returns a reader of a folder, which may be a multimodal checkpoint's."""
        return TextReader(path)

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns the tensors under their Hugging Face names, without adapters and a tied head, which files leave out."""
        tied = self.model_config.enable_weight_tying
        named: dict[str, Any] = {}
        for name, tensor in state_dict.items():
            if not is_adapter(name) and not (tied and name == "lm_head.weight"):
                named[_renamed(name, NAMES)] = tensor
        return named

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        names = {theirs: ours for ours, theirs in NAMES.items()}
        return {_renamed(name, names): tensor for name, tensor in hf_state_dict.items()}


def longest_window(model: Decoder.Config) -> int:
    """Returns the longest sliding window of a model's layers, 0 without one. A shorter sequence does not show whether windows are
    right."""
    windows = model.windows if isinstance(model, HFDecoder.Config) else ()
    return max((window for window in windows if window), default=0)


def _renamed(name: str, beginnings: dict[str, str]) -> str:
    """The name with one of these beginnings in place of another."""
    for begin, other in beginnings.items():
        if name.startswith(begin):
            return other + name.removeprefix(begin)
    return name


def parallelize_hf(model: HFDecoder, **options: Any) -> HFDecoder:
    """Applies activation checkpointing, compilation and FSDP2 or HSDP. Qwen3's function does so for any decoder without TP."""
    parallelize_qwen3(model, **options)
    for i, layer in model.layers.items():  # which may be wrapped now: transformers' model runs them
        model._base[0].layers[int(i)] = layer
    return model


def check_parallelism(config: HFDecoder.Config, degree: int) -> None:
    """Check that the trainer's tensor parallelism is off. Raises UserError, naming the field."""
    field = "trainer.parallelism.tensor_parallel_degree"
    expected = f"1 for {config.hf.model_type}, which runs with transformers' layers"
    remedy = "Use data_parallel_shard_degree (FSDP). The generator's degree may differ."
    expect(degree == 1, field, degree, expected, remedy)


def check_attention(config: Decoder.Config, attention: str) -> None:
    """Check that a model's layers can have this `trainer.attention`. Raises UserError, naming the field."""
    if isinstance(config, HFDecoder.Config) and (config.linear or longest_window(config)):
        expected = f'"auto" for {config.hf.model_type}, which has sliding windows or linear layers'
        expect(attention == "auto", "trainer.attention", attention, expected, "Leave it out.")


def check_other_parts(
    config: Decoder.Config,
    trainer: Configurable.Config,
    generator: Configurable.Config,
    *,
    on_cpu: bool,
) -> None:
    """Check that the engine computes a model of transformers as its layers do, and that its weights can be proven.

    Raises UserError, naming the field.
    """
    if not isinstance(config, HFDecoder.Config):
        return
    kind, degree = config.hf.model_type, generator.tensor_parallel_degree
    check_parallelism(config, trainer.parallelism.tensor_parallel_degree)
    check_attention(config, trainer.attention)
    expected = f"1 for {kind}, whose {', '.join(config.merged)} cannot be compared in parts with the policy's"
    holds = degree == 1 or not config.merged
    expect(holds, "generator.tensor_parallel_degree", degree, expected, "Use 1.")
    longest, window = generator.max_model_len, longest_window(config)
    expected = f"at most the sliding window of {kind}, {window}: vLLM's window is one token longer"
    holds = kind not in LONGER_WINDOWS or longest <= (window or longest)
    expect(holds, "generator.max_model_len", longest, expected, "Lower it.")
    targets = trainer.lora.targets if trainer.lora.rank else ()
    expected = f"neither gate_proj nor up_proj for {kind}, whose one matrix of both is two to vLLM's adapters"
    remedy = "Set --trainer.lora.targets qkv_proj o_proj down_proj."
    holds = kind not in HALVES_IN_ENGINE or {"gate_proj", "up_proj"}.isdisjoint(targets)
    expect(holds, "trainer.lora.targets", trainer.lora.targets, expected, remedy)
    if config.linear:
        check_linear(config.hf, trainer, generator, on_cpu=on_cpu)
