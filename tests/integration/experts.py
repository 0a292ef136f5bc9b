"""Mixtures of experts: policy, engine and shards agree on any layout.

    torchrun --nproc_per_node=2 tests/integration/experts.py --no-engine                          # FSDP 2
    torchrun --nproc_per_node=4 tests/integration/experts.py --no-engine --expert-parallel 2      # FSDP 2 of the halves
    torchrun --nproc_per_node=2 tests/integration/experts.py --expert-parallel 2                  # each rank has half of the experts
    torchrun --nproc_per_node=2 tests/integration/experts.py --generator-tp 2                     # one engine on 2 ranks

Prints the largest differences; exits non-zero if one is over its bound.
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

from tests.parts.hf_decoders import engine_figures, policy_figures  # noqa: E402
from tests.parts.tiny import save_odd_checkpoint  # noqa: E402
from torchtitan_rl import comm  # noqa: E402

BOUNDS = {"transformers": 1e-5, "sharded gradients": 1e-6, "engine": 1e-5, "engine after a change": 2e-5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=8, help="experts of a layer")
    parser.add_argument("--no-engine", action="store_true", help="compare the policies alone, which takes seconds")
    parser.add_argument("--expert-parallel", type=int, default=1)
    parser.add_argument("--generator-tp", type=int, default=1)
    args = parser.parse_args()
    comm.init_process_group(CommConfig(trace_buf_size=0))
    own = tempfile.TemporaryDirectory()
    folder = Path(comm.broadcast(own.name))  # rank 0's
    if dist.get_rank() == 0:
        save_odd_checkpoint(folder, "qwen3_moe", tie=False, num_experts=args.experts)
    dist.barrier()
    figures = policy_figures(folder, experts=args.expert_parallel)
    if not args.no_engine:
        figures |= engine_figures(folder, args.generator_tp, experts=args.expert_parallel)
    if os.environ["RANK"] == "0":
        print(", ".join(f"{name} {value:.1e}" for name, value in figures.items()), flush=True)
    wrong = [f"{name} {value:.1e}" for name, value in figures.items() if not value <= BOUNDS[name]]
    if dist.is_initialized():
        comm.close_process_group()
    sys.exit(f"over the bound: {'; '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
