"""Families that run with transformers' layers: policy, engine and shards agree, for each from an odd-shaped random folder.

    torchrun --nproc_per_node=2 tests/integration/hf_decoders.py --no-engine   # all families, sharded on 2 ranks
    torchrun --nproc_per_node=1 tests/integration/hf_decoders.py               # with their engines, one after another
    torchrun --nproc_per_node=4 tests/integration/hf_decoders.py gemma3_text olmo2 --no-engine --replicate 2   # HSDP
    torchrun --nproc_per_node=2 tests/integration/hf_decoders.py olmo2 --generator-tp 2   # one family
    torchrun --nproc_per_node=2 tests/integration/hf_decoders.py qwen3_moe --expert-parallel 2   # a mixture of experts, which ranks share

Prints the largest differences of each family; exits non-zero if one is over its bound.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from torchtitan_rl import device  # noqa: E402, F401  (before torchtitan and vLLM)

# isort: split
import torch.distributed as dist  # noqa: E402
from torchtitan.config import CommConfig  # noqa: E402

from tests.parts.hf_decoders import (  # noqa: E402
    BOUNDS,
    FOR_ENGINE,
    HF_FAMILIES,
    IN_BFLOAT16,
    engine_figures,
    policy_figures,
    save_hf_family,
)
from tests.parts.tiny import save_odd_checkpoint  # noqa: E402
from torchtitan_rl import comm  # noqa: E402

EXPERTS = "qwen3_moe"
"""A family of torchtitan's own layers."""
BOUNDS_OF = {
    "qwen3_5_text": BOUNDS | IN_BFLOAT16,
    EXPERTS: {"transformers": 1e-5, "sharded gradients": 1e-6, "engine": 1e-5, "engine after a change": 2e-5},
}


def save(folder: Path, family: str, *, for_engine: bool = False) -> None:
    """The family's checkpoint, on rank 0; all ranks wait for it."""
    if dist.get_rank() == 0:
        if family == EXPERTS:
            save_odd_checkpoint(folder, family, tie=False, num_experts=8)
        else:
            save_hf_family(folder, family, **(FOR_ENGINE.get(family, {}) if for_engine else {}))
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help=f"{EXPERTS}, or by default {' '.join(HF_FAMILIES)}")
    parser.add_argument("--no-engine", action="store_true", help="compare the policies alone, which takes seconds")
    parser.add_argument("--replicate", type=int, default=1)
    parser.add_argument("--expert-parallel", type=int, default=1)
    parser.add_argument("--generator-tp", type=int, default=1, help="as many as there are ranks")
    args = parser.parse_args()
    if args.generator_tp > 1 and len(args.families) != 1:
        parser.error("--generator-tp: name one family; ranks that have closed an engine cannot meet for another")
    wrong = []
    for family in args.families or HF_FAMILIES:
        if not dist.is_initialized():  # an engine's end destroys it
            comm.init_process_group(CommConfig(trace_buf_size=0))
        own = tempfile.TemporaryDirectory()
        folder = Path(comm.broadcast(own.name))  # rank 0's
        save(folder, family)
        experts = args.expert_parallel
        figures = policy_figures(folder, args.replicate, experts=experts)
        if not args.no_engine:
            save(folder, family, for_engine=True)
            figures |= engine_figures(folder, args.generator_tp, experts=experts)
        bounds = BOUNDS_OF.get(family, BOUNDS)
        wrong += [f"{family}: {name} {value:.1e}" for name, value in figures.items() if not value <= bounds[name]]
        if os.environ["RANK"] == "0":
            print(f"{family:12}", ", ".join(f"{name} {value:.1e}" for name, value in figures.items()), flush=True)
    if dist.is_initialized():
        comm.close_process_group()
    sys.exit(f"over the bound: {'; '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
