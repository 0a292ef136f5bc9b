"""Rehearses the trainer on a machine without a GPU and prints what is wrong. Exits with 1 if anything is.

python -m tests.gpu_rehearsal quick [REPORT.json]    five layouts of a shallow model, and the introduced faults: a minute
python -m tests.gpu_rehearsal long [CONFIG ...]      each shipped config at its documented size, 64 ranks: tens of minutes
"""

import json
import multiprocessing
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import reduce
from pathlib import Path
from typing import Any

from tests.gpu_rehearsal.trainer import Layout, Rehearsal, on_layout, rehearse

# isort: split
from scripts.make_random_checkpoint import qwen3
from tests.gpu_rehearsal import machine
from tests.gpu_rehearsal.checks import faults_of
from tests.gpu_rehearsal.faults import FAULTS
from tests.gpu_rehearsal.shipped import model_folder, shipped
from tests.parts.algorithm import algorithm_of
from torchtitan_rl.algorithm import KL, Algorithm
from torchtitan_rl.algorithm.losses.distillation import Distill, ExactDistill
from torchtitan_rl.command.registry import config_functions, load_config
from torchtitan_rl.config import RunConfig
from torchtitan_rl.configs.toys.small_models import small_qwen3
from torchtitan_rl.run.memory import GIB, choose_by_memory

LAYOUTS = [Layout(1), Layout(8), Layout(8, tp=2), Layout(16, replicate=2), Layout(8, ep=4)]
FAULTY = Layout(4)


def _set(path: str, value: Any) -> Callable[[RunConfig], None]:
    owner, _, name = path.rpartition(".")
    return lambda config: setattr(reduce(getattr, owner.split("."), config), name, value)


FULL_DEPTH = ("qwen3_0_6b", "qwen3_8b", "qwen3_30b_a3b")
"""Configs that the long part rehearses with all layers. Others have four: the same model, with another task or objective."""
SIZES = {"1.7B": Layout(1), "4B": Layout(2), "8B": Layout(8), "14B": Layout(64, tp=2, replicate=2)}
"""Sizes of Qwen3 that the long part rehearses with the settings of qwen3_8b, and all layers."""
CARDS = {"1.7B": (24, 0, 8192), "4B": (24, 32, 16384), "8B": (80, 32, 16384)}
"""Sizes that it rehearses on one card -> its GiB, LoRA's rank, tokens of a micro-batch. docs/one_gpu.md has their memory."""
OPTIONS = {
    "selective checkpointing": _set("trainer.activation_checkpoint", "selective"),
    "full checkpointing": _set("trainer.activation_checkpoint", "full"),
    "no checkpointing": _set("trainer.activation_checkpoint", "none"),
    "weights stay gathered": _set("trainer.parallelism.fsdp_reshard_after_forward", "never"),
    "FlexAttention": _set("trainer.attention", "flex"),
    "float32": _set("trainer.mixed_precision_param", "float32"),
    "moments on the host": _set("trainer.optimizer.on_host", True),
    "two epochs": _set("trainer.num_epochs", 2),
    "two minibatches": _set("trainer.num_minibatches", 2),
    "a reference policy": _set("algorithm.kl", KL.Config(coef=0.1)),
}
"""Options of the trainer that the long part takes on 8 ranks."""


TEACHERS = {"an 8B teacher, exact": ExactDistill.Config(), "an 8B teacher, sampled": Distill.Config()}
"""Losses with which the long part lets 0.6B learn from 8B on 8 ranks, all layers of both."""


def _small(layout: Layout) -> RunConfig:
    """A Qwen3 of 42M parameters in two layers, with qwen3_0_6b's settings. With expert parallelism its MLPs are 8 experts each; on
    one card its moments are on the host."""
    config = on_layout(shipped("qwen3_0_6b"), layout)
    sizes = {"vocab_size": 16384, "dim": 1024, "n_layers": 2, "n_heads": 16, "n_kv_heads": 8, "head_dim": 128}
    mlp = {"hidden_dim": 384, "num_experts": 8} if layout.ep > 1 else {"hidden_dim": 3072}
    config.model_spec = small_qwen3(**sizes, **mlp, max_seq_len=2048)
    config.trainer.max_tokens_per_microbatch = 1024
    config.generator.router_replay = layout.ep > 1
    config.trainer.optimizer.on_host = layout.world == 1
    return config


def _rank(
    layout: Layout, rank: int, fault: str | None = None, option: str | None = None, updates: int = 2
) -> Rehearsal | str:
    """Rehearses one rank of the small model. Returns the traceback if the product raises."""
    config = _small(layout)
    if option:
        OPTIONS[option](config)
    try:
        with FAULTS[fault]() if fault else nullcontext():
            prompts = max(2, layout.world // layout.tp)
            return rehearse(config, layout, rank, prompts=prompts, longest=200, updates=updates)
    except Exception:
        return traceback.format_exc()


def _verdict(records: list[Rehearsal | str]) -> list[str]:
    raised = [record for record in records if isinstance(record, str)]
    return raised or faults_of(records)


def ranks_of(layout: Layout) -> list[int]:
    """The first two ranks, the last, and with tensor parallelism the first rank's neighbour in its FSDP group."""
    return sorted({0, min(1, layout.world - 1), layout.tp % layout.world, layout.world - 1})


def quick() -> dict[str, dict[str, list[str]]]:
    """Returns {"layouts": {name: what is wrong}, "faults": {name: what the rehearsal said of it}}."""
    _rank(Layout(1), 0, updates=0)  # fills torch's caches before the processes fork; a backward would start threads
    jobs = [(layout, rank) for layout in LAYOUTS for rank in ranks_of(layout)]
    faulty = [
        (FAULTY, rank, fault, None, 1)
        for fault in FAULTS
        for rank in (0, 1)[: 1 + (fault == "another order of collectives")]
    ]
    # A process for each rank: torch keeps group names of a process's first run.
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        ended = pool.starmap(_rank, [*jobs, *faulty], chunksize=1)
    verdicts = {str(one): _verdict([r for r, j in zip(ended, jobs, strict=False) if j[0] == one]) for one in LAYOUTS}
    told = {
        fault: _verdict([r for r, j in zip(ended[len(jobs) :], faulty, strict=True) if j[2] == fault])
        for fault in FAULTS
    }
    return {"layouts": verdicts, "faults": told}


def documented(name: str) -> Layout:
    """The number of GPUs in a config's docstring, and its own degrees."""
    config, text = load_config(name), config_functions()[name].__doc__ or ""
    tp = config.trainer.parallelism.tensor_parallel_degree
    number = re.search(r"[Oo]n (\d+)", text)
    ep = config.trainer.parallelism.expert_parallel_degree
    return Layout(max(int(number[1]) if number else 1, tp), tp=tp, ep=ep)


def long(names: list[str]) -> dict[str, dict[str, list[str]]]:
    """As `quick`, for each config at its documented size, each option, and 14B on 64 ranks. One process at a time."""
    jobs: list[tuple] = [(_whole, name, documented(name)) for name in names or config_functions()]
    if not names:
        jobs += [(_size, size, layout) for size, layout in SIZES.items()]
        jobs.sort(key=lambda job: job[2].world, reverse=True)  # the slowest first
        jobs += [(_on_card, size, Layout(1)) for size in CARDS]
        jobs += [(_taught, name, LAYOUTS[1]) for name in TEACHERS]
        jobs += [(_option, option, layout) for option in OPTIONS for layout in LAYOUTS[1:3]]
    verdicts = {}
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for (_, name, layout), (faults, row) in zip(jobs, pool.imap(_job, jobs), strict=True):
            verdicts[f"{name} on {layout}"] = faults
            print(f"{name} on {layout}: {row}: {'; '.join(faults) or 'ok'}", flush=True)
    return {"layouts": verdicts}


def _job(job: tuple) -> tuple[list[str], str]:
    """Returns what is wrong, and what was counted."""
    function, name, layout = job
    begin = time.monotonic()
    record = function(name, layout)
    if isinstance(record, str):
        return [record[-1500:]], "failed"
    sizes = [f"{p} {record.peaks[p] / GIB:.1f} of {record.predicted[p] / GIB:.1f} GiB" for p in ("sync", "update")]
    counts = [f"{sum(record.operators[p].values()):,} kernels" for p in ("update", "sync")]
    waits, forwards = record.syncs.total(), record.forwards
    collectives = sum(record.in_update.values())
    row = f"{', '.join(sizes)}; update {counts[0]}, {waits} waits, {collectives} collectives in {forwards} forwards; sync {counts[1]}"
    return faults_of([record]), f"{row}; {time.monotonic() - begin:.0f} s"


def _option(option: str, layout: Layout) -> Rehearsal | str:
    return _rank(layout, 0, option=option)


def _size(size: str, layout: Layout) -> Rehearsal | str:
    config = on_layout(shipped("qwen3_8b"), layout)
    config.model_spec = qwen3(size)
    config.generator.tensor_parallel_degree = min(config.generator.tensor_parallel_degree, layout.world)
    return _rehearsed(config, layout)


def _on_card(size: str, layout: Layout) -> Rehearsal | str:
    config = on_layout(shipped("gsm8k"), layout)
    gib, config.trainer.lora.rank, config.trainer.max_tokens_per_microbatch = CARDS[size]
    config.model_spec = qwen3(size)
    return _rehearsed(config, layout, gib * GIB)


def _taught(name: str, layout: Layout) -> Rehearsal | str:
    config = on_layout(shipped("qwen3_0_6b"), layout)
    config.algorithm = Algorithm.Config(loss=TEACHERS[name])
    config.teacher = model_folder(qwen3("8B"), tempfile.mkdtemp())
    return _rehearsed(config, layout)


def _whole(name: str, layout: Layout) -> Rehearsal | str:
    config = on_layout(shipped(name), layout)
    if config.teacher:
        config.teacher = model_folder(config.model_spec, tempfile.mkdtemp())  # a recipe's model is the policy's
    if name == "debug_moe":
        config.trainer.mixed_precision_param = "bfloat16"  # the one dtype of torch's description of a grouped product
    if name not in FULL_DEPTH:
        config.model_spec.model.layers = config.model_spec.model.layers[:4]
    return _rehearsed(config, layout)


def _rehearsed(config: RunConfig, layout: Layout, gpu_bytes: int = machine.TOTAL_BYTES) -> Rehearsal | str:
    tokens, longest = config.trainer.max_tokens_per_microbatch, config.sampling.max_tokens
    # A prompt has 4 completions of 3/4 of the longest: a micro-batch for each rank.
    prompts = max(2, layout.world // layout.tp * tokens // (3 * longest))
    try:
        on = {"world_size": layout.world, "gpu_bytes": gpu_bytes}
        choose_by_memory(config, algorithm_of(config), **on)
        return rehearse(config, layout, 0, prompts=prompts, longest=longest)
    except Exception:
        return traceback.format_exc()


def _main(part: str, *rest: str) -> int:
    parts: dict[str, Callable] = {"quick": quick, "long": lambda: long(list(rest))}
    report = parts[part]()
    if part == "quick" and rest:
        Path(rest[0]).write_text(json.dumps(report))
    for name, faults in report["layouts"].items() if part == "quick" else ():
        print(f"{name}: {'; '.join(faults) or 'ok'}")
    for fault, told in report.get("faults", {}).items():
        print(f"introduced: {fault}: {'; '.join(told) or 'UNSEEN'}")
    return int(any(report["layouts"].values()) or not all(report.get("faults", {}).values()))


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
