"""Rehearses --trainer.compile with real numbers: a CPU kernel stands for FlashAttention, and aot_eager for inductor.

python -m tests.gpu_rehearsal.compiled     a minute or two; prints what is wrong, and exits with 1 if anything is
"""

import os
import sys
import tempfile
from functools import partial
from pathlib import Path

os.environ |= {"TORCH_COMPILE_DISABLE": "0", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
from torchtitan_rl.core import device  # noqa: F401  (before torchtitan)

# isort: split
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import varlen
from torchtitan.distributed.utils import set_spmd_backend

from tests.parts.tiny import save_tiny_checkpoint, tiny_spec
from torchtitan_rl.core import comm
from torchtitan_rl.core.algorithm import KL
from torchtitan_rl.core.algorithm.episodes import draft_episodes
from torchtitan_rl.core.trainer import attention, logprobs
from torchtitan_rl.core.trainer import trainer as trainer_module
from torchtitan_rl.core.trainer.trainer import Trainer
from torchtitan_rl.core.types import Completion, Group, Prompt, ScoredCompletion
from torchtitan_rl.setup.registry import load_config
from torchtitan_rl.train import build_policy

STEPS = [(4, 20), (2, 60), (6, 64), (1, 10), (3, 64), (5, 30), (4, 50), (7, 17), (2, 33)]
"""(prompts, longest completion) of each step."""
SETTLED = 5
"""Steps after which nothing more may be compiled."""


def _ends(cumulative: Tensor) -> list[tuple[int, int]]:
    ends = cumulative.tolist()
    return list(zip(ends, ends[1:], strict=False))


def _attend(q: Tensor, k: Tensor, v: Tensor, ends: list[tuple[int, int]], scale: float | None) -> Tensor:
    """[T, N, H], [T, K, H] twice -> [T, N, H]: causal attention within each sequence."""
    rows = [[t[a:b].transpose(0, 1)[None].float() for t in (q, k, v)] for a, b in ends]
    out = [F.scaled_dot_product_attention(*row, is_causal=True, scale=scale, enable_gqa=True)[0] for row in rows]
    return torch.cat([row.transpose(0, 1) for row in out]).to(q.dtype)


@varlen._varlen_attn.register_kernel("cpu")
def _forward(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False, scale=None, *rest, **named):  # noqa: ANN001, ANN002, ANN003, ANN202
    assert (q.dtype, cu_q.dtype, is_causal) == (torch.bfloat16, torch.int32, True)
    assert int(cu_q[-1]) == len(q)
    statistics = q.new_zeros(q.shape[1], len(q), dtype=torch.float32)
    return _attend(q, k, v, _ends(cu_q), scale), statistics, torch.zeros(2, dtype=torch.uint64)


@varlen._varlen_attn_backward.register_kernel("cpu")
def _backward(g, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, is_causal, rng, scale=None, *rest, **named):  # noqa: ANN001, ANN002, ANN003, ANN202
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        return torch.autograd.grad(_attend(*leaves, _ends(cu_q), scale), leaves, g)


def _use_flash_and_aot_eager() -> None:
    attention.compute_capability = lambda: (8, 0)
    trainer_module.CompileConfig = partial(trainer_module.CompileConfig, backend="aot_eager")
    for name in ("statistics", "gradient", "logprob_gradient"):
        plain = getattr(logprobs, f"_{name}")
        setattr(logprobs, f"_compiled_{name}", torch.compile(plain, backend="aot_eager"))


def _trainer(folder: str, *, compile: bool, checkpointing: str) -> Trainer:
    config = load_config("debug_bf16")
    config.model_spec, config.hf_assets_path, config.algorithm.kl = tiny_spec(), folder, KL.Config(coef=0.1)
    config.generator.max_model_len, config.sampling.max_tokens = 128, 64
    config.trainer.compile, config.trainer.activation_checkpoint = compile, checkpointing
    config.trainer.max_tokens_per_microbatch, config.trainer.logprob_chunk_tokens = 256, 32
    algorithm = config.algorithm.build(max_completion_tokens=64)
    return build_policy(config, algorithm, Path(folder))


def _step(prompts: int, longest: int, rng: np.random.Generator) -> list[Group]:
    def sample(number: int, reward: float) -> ScoredCompletion:
        ids = rng.integers(1, 100, int(rng.integers(1, longest + 1)))
        end = {"text": "", "finish_reason": "stop"}
        done = Completion(sample_idx=number, policy_version=0, token_ids=ids, logprobs=-np.ones(len(ids)), **end)
        return ScoredCompletion(completion=done, reward=reward)

    def group(number: int) -> Group:
        ids = rng.integers(1, 100, int(rng.integers(3, 20)))
        prompt = Prompt(prompt_idx=number, text="", token_ids=ids, expected_answer="")
        # Every third group has equal rewards, and so micro-batches without a gradient.
        return Group(prompt=prompt, samples=[sample(i, float(i % 2) if number % 3 else 1.0) for i in range(4)])

    return [group(i) for i in range(prompts)]


def rehearse(folder: str, checkpointing: str) -> list[str]:
    """Train a compiled and an eager policy on the same steps. Returns what is wrong."""
    counters.clear()
    torch._dynamo.reset()
    trainers = [_trainer(folder, compile=compile, checkpointing=checkpointing) for compile in (True, False)]
    rng, faults, graphs = np.random.default_rng(0), [], []
    for prompts, longest in STEPS:
        scored, norms = _step(prompts, longest, rng), []
        for trainer in trainers:
            groups = draft_episodes(scored)
            trainer.score_reference(groups)
            trainer.algorithm.assign_credit(groups)
            norms.append(trainer.update(groups).grad_norm)
        graphs.append(counters["stats"]["unique_graphs"])
        if not abs(norms[0] - norms[1]) <= 0.02 * norms[1]:
            faults.append(f"step {len(graphs)}: gradient norm {norms[0]:.5g} compiled, {norms[1]:.5g} eager")
    if counters["graph_break"]:
        faults.append(f"graph breaks: {dict(counters['graph_break'])}")
    if graphs[SETTLED - 1] != graphs[-1] or not graphs[-1]:
        faults.append(f"compiled graphs after each step: {graphs}")
    print(
        f"compile, {checkpointing} checkpointing: graphs after each step {graphs}; {'; '.join(faults) or 'ok'}",
        flush=True,
    )
    return faults


def _main() -> int:
    _use_flash_and_aot_eager()
    config = load_config("debug_bf16")
    set_spmd_backend(config.trainer.parallelism.spmd_backend)
    comm.init_process_group(config.comm)
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_checkpoint(Path(folder))
        faults = [fault for kind in ("none", "selective", "full") for fault in rehearse(folder, kind)]
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(_main())
