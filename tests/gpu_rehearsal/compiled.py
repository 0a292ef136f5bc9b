"""Compiles the trainer as a GPU does, but for the generated code, and compares it with eager on real numbers.

    python -m tests.gpu_rehearsal.compiled [REPORT.json [CASE ...]]

A GPU's branches run on a CPU: varlen attention and products with a wider result have CPU kernels (cpu_kernels.py). "aot_eager" traces
forward and backward to graphs, as Inductor gets them, and runs these operator by operator. A break of a graph raises.
"""

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

os.environ |= {"TORCH_COMPILE_DISABLE": "0", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
from torchtitan_rl import device  # noqa: E402, F401  (before torchtitan)

# isort: split
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch._dynamo as dynamo  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.attention import flex_attention  # noqa: E402
from torchtitan.config import ParallelismConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.utils import set_spmd_backend  # noqa: E402

from tests.gpu_rehearsal import cpu_kernels  # noqa: E402, F401
from tests.gpu_rehearsal.cases import CASES  # noqa: E402
from tests.gpu_rehearsal.steps import scored_group  # noqa: E402
from tests.parts.hf_decoders import save_hf_family  # noqa: E402
from tests.parts.tiny import save_odd_checkpoint, save_tiny_checkpoint  # noqa: E402
from torchtitan_rl.algorithm import KL, Algorithm  # noqa: E402
from torchtitan_rl.algorithm.episodes import draft_episodes  # noqa: E402
from torchtitan_rl.models import attention, logprobs  # noqa: E402
from torchtitan_rl.models.hf_config import spec_from_folder  # noqa: E402
from torchtitan_rl.models.lora.lora_config import LoraConfig  # noqa: E402
from torchtitan_rl.trainer import model_loader as loader_module  # noqa: E402
from torchtitan_rl.trainer.teachers.frozen_models import Reference  # noqa: E402
from torchtitan_rl.trainer.trainer import Trainer  # noqa: E402
from torchtitan_rl.types import Group  # noqa: E402

LONGEST = 64
SIZES = [(4, 4, 3, 20), (2, 4, 10, 60), (6, 4, 3, 64), (1, 2, 3, 10), (3, 8, 20, 64), (5, 4, 1, 30)]
"""Of each step: prompts, completions of each, and their least and greatest length."""
BOUND = 1e-5
"""Largest relative difference of a gradient norm, and difference of a log-probability, between compiled and eager."""


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """The branches of a Hopper GPU, and "aot_eager" for Inductor."""
    config = loader_module.CompileConfig
    compiled = {
        f"_compiled{name}": torch.compile(getattr(logprobs, name), backend="aot_eager", fullgraph=True)
        for name in ("_statistics", "_gradient")
    }
    flex = torch.compile(flex_attention.flex_attention, backend="aot_eager", fullgraph=True)
    with (
        mock.patch.multiple(logprobs, wide=lambda t: t, partial_product=logprobs.product, **compiled),
        mock.patch.object(attention, "compute_capability", return_value=(9, 0)),
        mock.patch.object(attention, "create_attention_mask", flex_attention.create_block_mask),
        mock.patch.object(attention, "_compiled_flex", flex),
        mock.patch.multiple(flex_attention, _validate_device=lambda *_: None),  # refuses a CPU's backward
        mock.patch.object(loader_module, "CompileConfig", lambda **k: config(**k, backend="aot_eager")),
    ):
        yield


def rehearse(folder: Path, *, kl: bool = False, entropy: float = 0.0, **settings: object) -> dict:
    """Take the same steps with a compiled and an eager trainer. Returns what differs and what was compiled."""
    dynamo.reset()
    dynamo.utils.counters.clear()
    rng = np.random.default_rng(0)
    compiled = _trainer(folder, kl, entropy, compile=True, compile_head=True, **settings)
    eager = _trainer(folder, kl, entropy, compile=False, compile_head=False, **settings)
    trainers = [compiled, eager]
    sources = [Reference(one) if kl else None for one in trainers]
    differences: list[float] = []
    variants: list[int] = []
    for number, size in enumerate(SIZES):
        groups = _step(rng, *size)
        norms: list[float] = []
        for trainer, source in zip(trainers, sources, strict=True):
            drafts = draft_episodes(groups)
            if source is not None:
                source.add_logprobs(drafts)
            trainer.algorithm.credit.assign(drafts)
            norms.append(trainer.update(drafts).grad_norm)
        scored = [trainer.token_logprobs(np.arange(1, 10 + number)) for trainer in (compiled, eager)]
        differences += [abs(norms[0] - norms[1]) / max(norms[1], 1e-9), float(np.abs(scored[0] - scored[1]).max())]
        variants.append(dynamo.utils.counters["stats"]["unique_graphs"])
    return {
        "attention": type(compiled.model.config.first_attention.inner_attention).__qualname__,
        "difference": max(differences),
        "bound": BOUND,
        "graphs": variants,
        "breaks": sum(dynamo.utils.counters["graph_break"].values()),
        "layers": len(compiled.model.layers),
    }


def _trainer(folder: Path, kl: bool, entropy: float, *, rank: int = 0, **settings: object) -> Trainer:
    lora = LoraConfig(rank=rank)
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    set_spmd_backend(parallelism.spmd_backend)
    objective = Algorithm.Config(kl=KL.Config(coef=0.1 if kl else 0.0), entropy_coef=entropy)
    settings |= {"logprob_chunk_tokens": 32, "max_tokens_per_microbatch": 256, "lora": lora}
    config = Trainer.Config(parallelism=parallelism, **settings)
    config.logprob_gate.distribution = False
    return config.build(
        model_spec=spec_from_folder(folder),
        hf_assets_path=str(folder),
        parallel_dims=ParallelDims.from_config(parallelism, 1),
        algorithm=objective.build(max_completion_tokens=LONGEST),
        num_steps=10,
        max_model_len=128,
        temperature=1.0,
        generator_dtype="bfloat16",
    )


def _step(rng: np.random.Generator, prompts: int, n: int, least: int, most: int) -> list[Group]:
    """Scored completions. Every third prompt's are all right, so they need no backward."""
    groups = []
    for number in range(prompts):
        rewards = [1.0] * n if number % 3 == 0 else rng.integers(0, 2, n).astype(float).tolist()
        groups.append(scored_group(rng, number, prompt=(3, 20), lengths=(least, most), rewards=rewards))
    return groups


def _save(folder: Path, family: str) -> Path:
    folder.mkdir(parents=True)
    if family == "qwen3":
        save_tiny_checkpoint(folder)
    elif family in ("qwen2", "llama"):
        save_odd_checkpoint(folder, family)
    else:
        save_hf_family(folder, family)
    return folder


def _main(report: str = "", *names: str) -> int:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as at, as_on_a_gpu():
        for number, name in enumerate(names or CASES):
            settings = dict(CASES[name])
            try:
                folder = _save(Path(at, str(number)), settings.pop("family", "qwen3"))
                found[name] = rehearse(folder, **settings)
            except Exception:
                found[name] = {"error": traceback.format_exc()[-2000:]}
            print(name, json.dumps(found[name]), flush=True)
    if report:
        Path(report).write_text(json.dumps(found))
    return int(any("error" in one for one in found.values()))


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
