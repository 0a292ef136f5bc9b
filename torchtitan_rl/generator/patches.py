"""What replaces vLLM's own parts in an engine: its tokenizer and statistics, a CPU's output head, the packing of experts."""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from vllm import LLM


def replace_engine_parts(llm: "LLM", tokenizer: Any, stats: Any) -> None:
    """Replace an engine's tokenizer, which finds stop texts (SamplingConfig.stop), and its statistics.

    Args:
        stats: replaces vLLM's Prometheus histograms (see generator/engine_stats.py). None: no statistics.
    """
    llm.llm_engine.output_processor.tokenizer = tokenizer
    if stats is not None:
        llm.llm_engine.logger_manager = stats


def replace_grammar_backend(llm: "LLM", backend: Any) -> None:
    """Let an engine follow grammars that `backend` compiles. vLLM's own needs a tokenizer of the engine's, and so does its check
    of a request."""
    llm.llm_engine.input_processor.structured_outputs_config = None
    llm.llm_engine.engine_core.engine_core.structured_output_manager.backend = backend


class Float32Head:
    """The float32 copy of a bfloat16 CPU engine's output head. Without one, vLLM casts the head at each decode step.

    Both of its operands hold bfloat16 values. So oneDNN may multiply them in bfloat16: each product is exact, and the sum
    is float32's. A CPU with such instructions takes half of the time.
    """

    def __init__(self, model: nn.Module) -> None:
        # vLLM's Cohere and Gemma 2 have no head beside their tied embedding.
        self.source = model.lm_head if hasattr(model, "lm_head") else model.model.embed_tokens
        self.weight = self.source.weight.float()  # [Vs, D]
        head = copy.copy(self.source)
        head._parameters = {
            **self.source._parameters,
            "weight": nn.Parameter(self.weight, requires_grad=False),
        }
        # Not a submodule: vLLM would look for its weights in each reload.
        model.logits_processor.register_forward_pre_hook(
            lambda _, args: (head, *args[1:]) if args[0] is self.source else None
        )
        model.logits_processor.register_forward_pre_hook(lambda *_: _multiply_in("bf16"))
        model.logits_processor.register_forward_hook(
            lambda *_: _multiply_in("none"), always_call=True
        )

    def refresh(self) -> None:
        """Copy the weights that the engine has now."""
        self.weight.copy_(self.source.weight)

    def is_current(self) -> bool:
        """Whether it equals the engine's own head, bit for bit."""
        return torch.equal(self.weight, self.source.weight.float())


def _multiply_in(precision: str) -> None:
    """Set the least precision in which oneDNN multiplies float32 matrices: "bf16", or "none" for torch's default."""
    torch.backends.mkldnn.matmul.fp32_precision = precision


def repack_experts(model: nn.Module) -> None:
    """Let a CPU engine's next reload pack the weights of experts anew. vLLM packs them while it makes a layer's kernel,
    which it does once; a later reload would copy weights as they are into packed ones.

    A GPU engine does not pack them, and its CUDA graphs need the first kernel.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def apply_adapter_at_once(model: nn.Module) -> None:
    """Let a CPU engine with one adapter multiply all tokens by it. vLLM copies A and B for every token, which takes
    longer than the rest of the layer. A GPU engine has kernels for it."""
    for wrapper in model.lora_manager.punica_wrapper_mapping.values():
        wrapper.add_lora_linear = _add_lora_linear


def _add_lora_linear(
    y: Tensor,
    x: Tensor,
    a_of_slices: Sequence[Tensor],
    b_of_slices: Sequence[Tensor],
    _scale: float,  # 1: vLLM has multiplied B by the adapter's
    sizes: Sequence[int],
    **_: Any,
) -> None:
    """Add B A x of each slice of a fused layer to `y` [T, sum of sizes], with x [T, D], A [1, 1, R, D] and B [1, 1,
    size, R]."""
    begin = 0
    for a, b, size in zip(a_of_slices, b_of_slices, sizes, strict=True):
        y[:, begin : begin + size].addmm_(x @ a[0, 0].t(), b[0, 0].t())
        begin += size
