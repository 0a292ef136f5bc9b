"""Generation alone: this project's scheduling on a CPU against vLLM's own, timed in turn in one process.

    .venv/bin/python scripts/bench/generate.py
    .venv/bin/python scripts/bench/generate.py --model 0.6b --prompts 4 --n 4 --new-tokens 190 --dtype bfloat16 --repeats 1

Random weights, exact completion lengths. Both sides have this project's kernels (norms, output head) and block size.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the launcher sets it, before torch is imported
from torchtitan_rl.core import device  # noqa: E402, F401  (before torchtitan and vLLM)

# isort: split
import torch  # noqa: E402

from scripts.bench.measure import alternate, machine_line  # noqa: E402
from scripts.bench.side_ours import config_of, start  # noqa: E402
from scripts.bench.step_vs_trl import MODELS, checkpoint  # noqa: E402
from torchtitan_rl.core.generator.generator import Generator  # noqa: E402
from torchtitan_rl.core.types import Prompt  # noqa: E402


def as_vllm(generator: Generator, generate: Callable[[], object]) -> None:
    """Without `SharedPrompts`."""
    scheduler = generator.llm.llm_engine.engine_core.engine_core.scheduler
    with patch.object(scheduler, "_twin", lambda request: None):
        generate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="tiny")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--n", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    job = {
        "model": str(checkpoint(args.model)), "folder": tempfile.mkdtemp(), "prompts_per_step": args.prompts, "n": args.n,
        "new_tokens": args.new_tokens, "ours": {"compute": args.dtype, "tokens_at_once": 8192},
    }  # fmt: skip
    controller = start(config_of(job))
    generator = controller.generator
    generator.end_token_ids = []  # every completion has the full length
    prompts: list[Prompt] = controller.services.prompts.next_batch(args.prompts)

    def generate() -> None:
        generator.llm.reset_prefix_cache()
        generator.generate(prompts)

    found = alternate({"vLLM's own": lambda: as_vllm(generator, generate), "ours": generate}, repeats=args.repeats)
    print(machine_line())
    for name, seconds in found.items():
        tokens = args.prompts * args.n * args.new_tokens
        print(f"{name}: {seconds.wall:.3f} s, cpu {seconds.cpu:.3f} s, {tokens / seconds.wall:,.0f} tokens/s")
    own, ours = found.values()
    print(f"ratio {own.wall / ours.wall:.2f}, cpu {own.cpu / ours.cpu:.2f}")
    controller.services.observer.close()
    controller.close()


if __name__ == "__main__":
    main()
