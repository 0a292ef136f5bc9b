"""Examines a model of transformers: may it be trained with packed sequences, with which windows and which logit scale?

Nothing is looked up by family. The model is built without weights, and its structure, the calls of its attention and the
transformation of its logits are read off. Whatever this trainer would compute differently is refused by name.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchtitan_rl.models.hf_decoder import build_transformers_model, linear_layers
from torchtitan_rl.models.linear_layers import LINEAR

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutputWithPast

ATTENDING = {"full_attention", "sliding_attention"}
"""The `layer_types` whose layers mix tokens by attention alone."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
LENGTH_DEPENDENT = ("dynamic", "longrope")
"""RoPE types whose frequencies depend on the longest sequence of a batch, so on the other sequences of a pack."""


class Unsupported(Exception):
    """The model cannot be trained. The text names the feature that this trainer does not compute."""


MERGED = {"qkv_proj", "gate_up_proj", "in_proj_qkv"}
"""The matrices that transformers stores as one and vLLM splits over an engine's ranks part by part."""


def examine(config: "PretrainedConfig", architecture: str) -> dict[str, Any]:
    """Returns the fields of `HFDecoder.Config` that follow from the model's code. Builds the model on the meta device.

    Raises Unsupported, naming what this trainer does not compute.
    """
    _check_config(config, architecture)
    try:
        with torch.device("meta"):
            model = build_transformers_model(config)
        _check_structure(model)
        merged = {name.rpartition(".")[2] for name, _ in model.named_modules()} & MERGED
        return {
            "merged": tuple(sorted(merged)),
            "linear": len(linear_layers(model.base_model)),
            "windows": _windows(model),
            "logit_scale": _logit_scale(model),  # last: it replaces parts of the model
        }
    except Unsupported:
        raise
    except Exception as error:  # whatever a model's own code raises
        fault = f"{type(error).__name__}: {error}"
        raise Unsupported(f"transformers' code for it raises {fault}") from error


def _refuse(is_so: Any, reason: str) -> None:
    if is_so:
        raise Unsupported(reason)


def _check_config(config: "PretrainedConfig", architecture: str) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    parts = sorted(config.sub_configs)
    _refuse(parts, f"it is multimodal or nested ({', '.join(parts)})")
    _refuse(getattr(config, "quantization_config", None) is not None, "it is quantized")
    _refuse(config.is_encoder_decoder, "it is an encoder-decoder")
    for name in EXPERTS:
        number = getattr(config, name, None) or 0
        _refuse(number > 1, f"it is a mixture of experts ({name} {number})")
    mixing = ATTENDING | ({"linear_attention"} if config.model_type in LINEAR else set())
    others = ", ".join(sorted(set(getattr(config, "layer_types", None) or ()) - mixing))
    _refuse(others, f"it is a hybrid or recurrent model, with layers of type {others}")
    decoder = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    known = f"which is {decoder.__name__}" if decoder else "and there is none"
    _refuse(
        decoder is None or decoder.__name__ != architecture,
        f"it is not transformers' decoder for model_type {config.model_type!r}, {known}",
    )
    is_cohere = config.model_type in ("cohere", "cohere2")
    _refuse(
        is_cohere and getattr(config, "rms_norm_eps", None) is not None,
        "it has rms_norm_eps, for which vLLM uses RMSNorm and transformers LayerNorm: leave it out",
    )
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer = all(isinstance(value, dict) for value in rope.values())
    for settings in rope.values() if by_layer else [rope]:
        kind = settings.get("rope_type")
        _refuse(
            kind in LENGTH_DEPENDENT,
            f"it has rope_type {kind!r}, which depends on the batch's longest sequence",
        )


def _check_structure(model: "PreTrainedModel") -> None:
    """Check that the parts have the usual names, and that only attention and linear layers mix tokens."""
    linear = {part for layer in linear_layers(model.base_model) for part in layer.modules()}
    for name, module in model.named_modules():
        kind = type(module).__name__
        is_mixture = "Moe" in kind or "MoE" in kind or "Expert" in kind
        _refuse(is_mixture, f"it is a mixture of experts ({kind})")
        own = [*module.parameters(recurse=False)] and module not in linear
        usual = isinstance(module, (nn.Linear, nn.Embedding)) or kind.endswith("Norm")
        _refuse(
            own and not usual,
            f"it has {name} of class {kind}: recurrent, convolutional or other parts beside attention and MLP",
        )
    parts, outer = _parts_with_weights(model.base_model), _parts_with_weights(model)
    usual = parts == ["embed_tokens", "layers", "norm"] and outer == ["lm_head", "model"]
    _refuse(
        model.base_model_prefix != "model" or not usual,
        f"its parts are {outer} with {parts}, not model and lm_head with embed_tokens, layers, norm",
    )
    named = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    stored = next(iter(sorted(model.state_dict().keys() - named)), "")
    _refuse(stored, f"it stores {stored}, which is no parameter and would not reach the engine")
    _refuse(model.lm_head.bias is not None, "it has a bias on its output head")


def _parts_with_weights(module: nn.Module) -> list[str]:
    return sorted(name for name, child in module.named_children() if [*child.parameters()])


class Calls:
    """Replaces a `PackedCall` and records the window of each attention module, None for a linear layer."""

    def __init__(self) -> None:
        self.windows: list[int | None] = []

    def __call__(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None,
        window: int | None,
        **options: Any,
    ) -> Tensor:
        is_causal = getattr(module, "is_causal", True) and options.get("is_causal") is not False
        _refuse(not is_causal, "its attention is not causal")
        _refuse(options, f"its attention uses {', '.join(sorted(options))}")
        k_size, v_size = q.shape[-1], v.shape[-1]
        _refuse(k_size != v_size, f"its heads have {k_size} entries in keys and {v_size} in values")
        self.windows.append(window)
        return torch.empty_like(q)

    def linear(self, forward: Callable[..., Tensor], hidden: Tensor) -> Tensor:
        self.windows.append(None)
        return torch.empty_like(hidden)


def _windows(model: "PreTrainedModel") -> tuple[int | None, ...]:
    calls, tokens = Calls(), torch.zeros(1, 4, dtype=torch.int64, device="meta")
    with torch.no_grad():
        model.model.forward(input_ids=tokens, position_ids=tokens, use_cache=False, packed=calls)
    layers, times = len(model.model.layers), len(calls.windows)
    _refuse(times != layers, f"its {layers} layers call attention {times} times")
    return tuple(calls.windows)


class _Known(nn.Module):
    """Takes the place of everything before the output head, with a known result."""

    hidden = torch.linspace(-60, 60, 241, dtype=torch.float64)[None, None]  # [1, 1, 241]

    def forward(self, **_: Any) -> "BaseModelOutputWithPast":
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=self.hidden)


def _logit_scale(model: "PreTrainedModel") -> float:
    """Returns the constant between the head's output and the logits, measured with known numbers. Replaces the model's parts."""
    model.model, model.lm_head = _Known(), nn.Identity()
    logits, hidden = model.forward().logits, _Known.hidden
    scale = float(logits[0, 0, -1] / hidden[0, 0, -1])
    is_scaled = scale > 0 and torch.allclose(logits, hidden * scale, rtol=1e-9, atol=0)
    reason = "it transforms its logits by more than a positive factor (a soft cap, for example)"
    _refuse(not is_scaled, reason)
    return scale
