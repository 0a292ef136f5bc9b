"""What the benchmarks share: alternated timings, a process's peak memory, a trainer without an engine, episodes of given lengths.

Every ratio comes from two things timed in turn in one process, so that a machine's other work falls on both. "cpu" is user and
system time of this process, which waiting for a core does not lengthen; on a GPU "wall" is the one to read.
"""

import ctypes
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from torchtitan_rl.core.device import DEVICE_TYPE, ON_CPU

# isort: split
import torch
import torch.distributed as dist
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_rl.core.algorithm import Algorithm
from torchtitan_rl.core.algorithm.episodes import draft_episodes
from torchtitan_rl.core.trainer.trainer import Trainer
from torchtitan_rl.core.types import Completion, Episode, Group, Prompt, ScoredCompletion
from torchtitan_rl.library.lora.adapters import Lora
from torchtitan_rl.library.models import new_hf_model


class Seconds(NamedTuple):
    wall: float
    cpu: float


def seconds_of(function: Callable[[], object]) -> Seconds:
    """One call's."""
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    if not ON_CPU:
        torch.cuda.synchronize()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def alternate(functions: dict[str, Callable[[], object]], *, repeats: int) -> dict[str, Seconds]:
    """Each function's median, after one call that is not counted; they are called in turn."""
    for function in functions.values():
        function()
    found: dict[str, list[Seconds]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            found[name].append(seconds_of(function))
    return {name: Seconds(*map(median, zip(*times, strict=True))) for name, times in found.items()}


def extra_peak_bytes(function: Callable[[], object]) -> int:
    """The rise of memory over its use before the call."""
    if not ON_CPU:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before
    before = in_use_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the kernel counts the peak from here
    function()
    return _status_bytes("VmHWM") - before


def in_use_bytes() -> int:
    """Bytes in use on the GPU, or by this process after it has given back the memory that it has freed."""
    if not ON_CPU:
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()


def resident_bytes() -> int:
    return _status_bytes("VmRSS")


def _status_bytes(field: str) -> int:
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def start(threads: int) -> None:
    """A run's adaptations to this device, a process group (of this process alone unless torchrun started it) and its threads."""
    torch.set_num_threads(threads)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, value)
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group("gloo" if ON_CPU else "nccl")
    else:
        dist.init_process_group("gloo" if ON_CPU else "nccl", store=dist.HashStore(), rank=0, world_size=1)


def checkpoint_of(spec: ModelSpec) -> str:
    """A folder with random weights of this architecture; deleted by nobody but the machine."""
    folder = tempfile.mkdtemp()
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        new_hf_model(spec).to(torch.bfloat16).save_pretrained(folder)
    holder = [folder]
    dist.broadcast_object_list(holder)
    return holder[0]


def build_trainer(spec: ModelSpec, *, dtype: str, max_len: int, folder: str = "", **settings: object) -> Trainer:
    """The trainer of a run over all ranks, for sequences of up to `max_len` tokens.

    Args:
        folder: the model's; empty: random weights.
    """
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    set_spmd_backend(parallelism.spmd_backend)
    config = Trainer.Config(parallelism=parallelism, mixed_precision_param=dtype, **settings)
    return config.build(
        model_spec=spec,
        hf_assets_path=folder or checkpoint_of(spec),
        parallel_dims=ParallelDims.from_config(parallelism, dist.get_world_size()),
        algorithm=Algorithm.Config().build(max_completion_tokens=max_len),
        num_steps=1000,
        max_model_len=max_len,
        temperature=1.0,
        generator_dtype="bfloat16",
        dump_folder="",
        policy_lora=Lora.of(config.lora),
    )


def random_step(
    lengths: Sequence[int], *, prompt_tokens: int, group_size: int, vocabulary: int, seed: int = 0
) -> list[Group[Episode]]:
    """Groups of `group_size` with completions of these lengths, random tokens and rewards, and their advantages."""
    rng = random.Random(seed)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(1, vocabulary) for _ in range(n)]

    def completion(sample: int, length: int) -> Completion:
        return Completion(
            sample_idx=sample, policy_version=0, token_ids=tokens(length), sampler_logprobs=[-5.0] * length, text="",
            finish_reason="stop",
        )  # fmt: skip

    groups = [
        Group(
            prompt=Prompt(prompt_idx=i, text="", token_ids=tokens(prompt_tokens), expected_answer=""),
            samples=[
                ScoredCompletion(completion=completion(s, n), reward=float(s % 2))
                for s, n in enumerate(lengths[begin : begin + group_size])
            ],
        )
        for i, begin in enumerate(range(0, len(lengths), group_size))
    ]
    episodes = draft_episodes(groups)
    Algorithm.Config().build(max_completion_tokens=max(lengths)).assign_credit(episodes)
    return episodes


def machine_line() -> str:
    """What to print with a result: the device, the threads, the load of the machine."""
    device = torch.cuda.get_device_name() if DEVICE_TYPE == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return f"{device}, load {load:.1f} on {os.cpu_count()} cores, torch {torch.__version__}"
