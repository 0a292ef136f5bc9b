"""The private names of vLLM that this package uses: what it reads of an engine, and what it replaces in one.

`tests/unit_tests/test_private_names.py` lists them, and says in a sentence which one a new version of vLLM has moved.
"""

import copy
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine


def stop_engine(llm: "LLM") -> None:
    """Stop the engine. vLLM itself does so when Python collects it, after the process group is gone."""
    llm.llm_engine.engine_core.shutdown()


def num_cached_blocks(llm: "LLM") -> int:
    """Returns the number of KV cache blocks that the prefix cache can reuse."""
    manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    return len(manager.block_pool.cached_block_hash_to_block)


def unfinished_outputs(engine: "LLMEngine") -> "list[RequestOutput]":
    """Returns the outputs of all requests that have not ended, with the tokens so far. vLLM aborts without them."""
    from vllm.v1.engine import FinishReason

    states = list(engine.output_processor.request_states.values())
    return [state.make_request_output([], None, FinishReason.ABORT, None) for state in states]


def model_runner(llm: "LLM") -> Any:
    """Returns what computes the batches of this rank's engine, for the functions below."""
    [runner] = llm.collective_rpc(lambda worker: worker.model_runner)
    return runner


def replace_sample(runner: Any, sample: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the function that samples a batch from its logits [N, V]. Returns the one before."""
    before, runner.sampler.sample = runner.sampler.sample, sample
    return before


def batch_rows(
    runner: Any, sampled: Sequence[Any]
) -> tuple[Collection[str], Sequence[str], Sequence[int]]:
    """Returns the engine's names of all requests, and the name and the place of the token read of each row of the batch.

    Args:
        sampled: the arguments of the sampler after the logits.
    """
    if not hasattr(runner, "req_states"):
        batch = runner.input_batch
        return runner.requests.keys(), batch.req_ids, batch.num_tokens_no_spec - 1
    _, _, indices, places, *_ = sampled  # a GPU's runner, for which this is not measured
    states = runner.req_states
    names = [states.index_to_req_id[index] for index in indices]
    return states.req_id_to_index.keys(), names, places


def cache_blocks(runner: Any, name: str) -> list[int]:
    """Returns the KV cache blocks of a CPU engine's request; none if it is not in the batch, and they may be another's."""
    if name not in runner.input_batch.req_id_to_index:
        return []
    [blocks] = runner.requests[name].block_ids
    return blocks


def capture_experts(llm: "LLM", capturer: Any) -> None:
    """Let a CPU engine's routers say what they chose. vLLM itself returns it from a GPU engine alone.

    Args:
        capturer: its `capture(layer_id, topk_ids)` gets the experts of the tokens in one layer's forward, [tokens, K].
    """
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
        bind_routed_experts_capturer,
    )

    llm.apply_model(partial(bind_routed_experts_capturer, capturer=capturer))


def forward_slots() -> Tensor:
    """Returns the KV cache slots of the tokens in a CPU engine's forward, [tokens]."""
    from vllm.forward_context import get_forward_context

    return next(iter(get_forward_context().slot_mapping.values()))  # all layers have the same


def experts_isa(layer: nn.Module) -> str | None:
    """Returns the name of the form in which a CPU engine packs a layer's experts; None on a GPU."""
    return getattr(layer.quant_method.moe_kernel.fused_experts, "isa", None)


def pack_experts(matrix: Tensor, isa: str) -> Tensor:
    """Pack a matrix [rows, columns] as a CPU engine packs an expert's."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    return cpu_prepack_moe_weight(matrix[None], isa)


def pack_convolution(matrix: Tensor) -> Tensor:
    """Pack a matrix [rows, columns] as a CPU engine packs a depthwise convolution's."""
    from vllm._custom_ops import causal_conv1d_weight_pack

    return causal_conv1d_weight_pack(matrix)


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the engine's layers with adapters, by their paths."""
    return model.lora_manager.modules


def adapter_buffers(layer: nn.Module, number: int) -> tuple[Tensor, Tensor]:
    """Returns A [R, D] and B [size, R] of slice `number` of an adapted layer, of the only adapter."""
    return layer.lora_a_stacked[number][0, 0], layer.lora_b_stacked[number][0, 0]


def name_shared_memory(job: str) -> None:
    """Let a CPU engine's ranks name the memory that they share after their job too. vLLM's name says which ranks, so two jobs that
    start at once would take each other's."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    _CPUSHMDistributed.make_group_name = staticmethod(
        lambda group: f"{job}-{group.unique_name}-{group.ranks}"
    )


def replace_engine_parts(llm: "LLM", tokenizer: Any, stats: Any) -> None:
    """Replace an engine's tokenizer, which finds stop texts (SamplingConfig.stop), and its statistics.

    Args:
        stats: replaces vLLM's Prometheus histograms (see generator/engine_stats.py).
    """
    llm.llm_engine.output_processor.tokenizer = tokenizer
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


def fuse_norms() -> dict[str, list[str]]:
    """Let CPU engines normalise with a kernel that vLLM has for them and does not use. It takes a fifth of the time, and rounds once.
    Returns the option `ir_op_priority`."""
    from vllm import ir, kernels  # noqa: F401 (the second registers kernels)

    names = ["rms_norm", "fused_add_rms_norm"]
    for kernel in (getattr(ir.ops, name).impls["vllm_c"] for name in names):
        if not kernel.supported:
            kernel.supported = True
            kernel.impl_fn = partial(_on_contiguous, kernel.impl_fn)
    return {name: ["vllm_c"] for name in names}


def _on_contiguous(kernel: Callable[..., Any], *args: Any) -> Any:
    """Returns what a kernel that reads tensors as if they were contiguous makes of any."""
    return kernel(*(a.contiguous() if isinstance(a, Tensor) else a for a in args))


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
