"""The machine that is pretended: a node of eight H100s."""

from types import SimpleNamespace

import torch

TOTAL_BYTES, CAPABILITY, NAME = 85_029_158_912, (9, 0), "NVIDIA H100 80GB HBM3"
_PROPERTIES = SimpleNamespace(
    total_memory=TOTAL_BYTES, name=NAME, major=9, minor=0, multi_processor_count=132, warp_size=32, gcnArchName="",
    max_threads_per_multi_processor=2048, L2_cache_size=50 << 20, shared_memory_per_block_optin=232448,
)  # fmt: skip
_ANSWERS = {
    "is_available": True, "is_bf16_supported": True, "is_current_stream_capturing": False,
    "device_count": 8, "_device_count_nvml": 8, "current_device": 0, "get_device_capability": CAPABILITY,
    "get_device_name": NAME, "get_device_properties": _PROPERTIES, "mem_get_info": (TOTAL_BYTES // 2, TOTAL_BYTES),
    "memory_allocated": 0, "memory_reserved": 0, "max_memory_allocated": 0, "memory_stats": {}, "_lazy_init": None,
    "init": None, "set_device": None, "empty_cache": None, "reset_peak_memory_stats": None,
}  # fmt: skip


def answer_with(module: object, answers: dict[str, object]) -> None:
    """Replace functions of `module` by ones that return a constant."""
    for name, value in answers.items():
        setattr(module, name, lambda *_, value=value, **__: value)


def answer_as_cuda() -> None:
    """Let torch.cuda answer as on this machine. Call it before torchtitan_rl is imported."""
    answer_with(torch.cuda, _ANSWERS)
    torch._utils._get_available_device_type = lambda: "cuda"
