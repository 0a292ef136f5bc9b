"""The collectives of an update and of a push on gloo, against what `scripts/bench/scaling.py` counts for this layout.

    torchrun --nproc_per_node=2 tests/integration/collectives.py
    torchrun --nproc_per_node=4 tests/integration/collectives.py --replicate 2 --max-tokens 60

A tiny random Qwen3, with every completion in the backward. Prints each kind with its calls and bytes, and exits with 1 if a figure differs.
"""

import argparse
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from torchtitan_rl.core import device  # noqa: E402, F401  (before torchtitan and vLLM)
from torchtitan_rl.library.models.build import build_trainer  # noqa: E402

# isort: split
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torchtitan.config import CommConfig, ParallelismConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.utils import set_spmd_backend  # noqa: E402

from scripts.bench.scaling import Traffic, push_traffic, units_of, update_traffic  # noqa: E402
from tests.integration.invariance import MAX_TOKENS, scored_step  # noqa: E402
from tests.parts.tiny import save_tiny_checkpoint, tiny_spec  # noqa: E402
from torchtitan_rl.core import comm  # noqa: E402
from torchtitan_rl.core.algorithm import Algorithm  # noqa: E402
from torchtitan_rl.core.algorithm.episodes import draft_episodes  # noqa: E402
from torchtitan_rl.core.trainer.trainer import Trainer  # noqa: E402

KINDS = {
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
}
"""Operators of c10d: the kinds of `Traffic`."""
SMALL = 1024
"""Bytes up to which a collective carries no layer: norms, losses, lists of Python values."""


class Counted(TorchDispatchMode):
    """Counts the collectives of this process: calls and bytes of the whole tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = defaultdict(int)
        self.bytes: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._opname if func.namespace in ("c10d", "_c10d_functional") else ""
        if name in KINDS:
            tensors = [one for one in tree_leaves(args) if isinstance(one, torch.Tensor)]
            # The whole tensor is the largest one: of a gather the result, of a scatter the input.
            size = max(one.numel() * one.element_size() for one in tensors)
            if name == "all_gather_into_tensor":  # DTensor's; it has the shard and the number of ranks
                size *= args[1]
            if size > SMALL:
                self.calls[KINDS[name]] += 1
                self.bytes[KINDS[name]] += size
        return func(*args, **(kwargs or {}))

    def traffic(self) -> dict[str, Traffic]:
        return {kind: Traffic(self.calls[kind], self.bytes[kind]) for kind in sorted(self.calls)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicate", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=10**6, help="of a micro-batch")
    args = parser.parse_args()
    comm.init_process_group(CommConfig(trace_buf_size=0))
    ranks = dist.get_world_size()
    parallelism = ParallelismConfig(data_parallel_replicate_degree=args.replicate, spmd_backend="partial_dtensor")
    set_spmd_backend(parallelism.spmd_backend)
    dims = ParallelDims.from_config(parallelism, ranks)
    folder = comm.broadcast(tempfile.mkdtemp() if comm.is_rank_0() else "")
    if comm.is_rank_0():
        save_tiny_checkpoint(Path(folder))
    comm.barrier()
    trainer = build_trainer(
        Trainer.Config(
            parallelism=parallelism, mixed_precision_param="float32", max_tokens_per_microbatch=args.max_tokens
        ),
        model_spec=tiny_spec(),
        hf_assets_path=folder,
        parallel_dims=dims,
        algorithm=Algorithm.Config(entropy_coef=0.01).build(max_completion_tokens=MAX_TOKENS),  # all get a backward
        num_steps=10,
        max_model_len=64,
        temperature=1.0,
        generator_dtype="bfloat16",
        dump_folder="",
    )
    groups = draft_episodes(scored_step())
    trainer.algorithm.credit.assign(groups)
    trainer.update(groups)
    forwards: list[int] = []
    trainer.model.register_forward_hook(lambda *_: forwards.append(1))
    with Counted() as update:
        trainer.update(groups)
    microbatches = len(forwards)
    with Counted() as push:
        for _ in trainer.hf_weights(torch.float32):
            pass
    if comm.is_rank_0():
        print(f"{ranks} ranks, {args.replicate} replicas, {microbatches} micro-batches on each", flush=True)
    shards = ranks // args.replicate
    units = units_of(tiny_spec())
    embedding = trainer.model.tok_embeddings.weight.numel()
    expected = {
        "update": update_traffic(units, shards=shards, replicas=args.replicate, microbatches=microbatches, width=4),
        "push": push_traffic(units, embedding=embedding, shards=shards, width=4),
    }
    wrong = 0
    for name, counted in (("update", update), ("push", push)):
        found = counted.traffic()
        for kind in sorted(set(found) | set(expected[name])):
            mine, theirs = expected[name].get(kind, Traffic(0, 0)), found.get(kind, Traffic(0, 0))
            wrong += mine != theirs
            if comm.is_rank_0():
                said = "" if mine == theirs else f"   but expected {mine.calls} calls, {mine.bytes:,} bytes"
                print(f"{name:7s} {kind:15s} {theirs.calls:4d} calls {theirs.bytes:12,} bytes{said}", flush=True)
    comm.barrier()
    comm.close_process_group()
    sys.exit(int(wrong > 0))


if __name__ == "__main__":
    main()
