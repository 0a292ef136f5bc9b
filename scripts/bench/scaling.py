"""The same step on 1, 2, 4 and 8 ranks of one machine: what each rank and all together hold, send and compute.

    .venv/bin/python scripts/bench/scaling.py --ranks 1 2 4 8

debug with as many prompts for any number of ranks. Ranks share this machine's cores, so seconds say nothing of speed: processor
seconds of all ranks together say what more ranks add. Messages are calls of torch.distributed's collectives, bytes those of the
buffers handed to them, to send from and to receive into; an engine's own (tensor parallelism inside vLLM) are not counted.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from torchtitan_rl.core import device  # noqa: E402, F401  (before torchtitan and vLLM)

# isort: split
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from configs.debug import debug  # noqa: E402
from scripts.bench.measure import resident_bytes  # noqa: E402
from scripts.bench.side_ours import start  # noqa: E402

STEPS, WARM_UP = 3, 2


class Messages(TorchDispatchMode):
    """Counts the collectives of this process and the bytes that it hands to them."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self.count["messages"] += 1
            self.count["bytes"] += sum(t.nbytes for t in tree_leaves(args) if isinstance(t, torch.Tensor))
        return func(*args, **(kwargs or {}))


def rank_job(folder: Path) -> None:
    """One rank: take the steps and write their cost to a file."""
    config = debug()
    config.dump_folder = str(folder / "run")
    config.evaluation.every = 0
    config.checkpoint.enable = False
    controller = start(config)
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            messages, begin, processor = Messages(), time.perf_counter(), time.process_time()
            messages.__enter__()
        controller.state.step += 1
        controller._train_step()
    messages.__exit__(None, None, None)
    found = {
        "wall s": (time.perf_counter() - begin) / STEPS,
        "processor s": (time.process_time() - processor) / STEPS,
        "memory GiB": resident_bytes() / 2**30,
        "messages": messages.count["messages"] / STEPS,
        "buffers MB": messages.count["bytes"] / STEPS / 1e6,
    }
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    controller.services.observer.close()
    controller.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--folder", type=Path, help="set by the parent in its ranks")
    args = parser.parse_args()
    if args.folder:
        rank_job(args.folder)
        return
    log_file = ROOT / "outputs/bench/scaling.log"
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            log_file.parent.mkdir(parents=True, exist_ok=True)
            with open(log_file, "w") as log:
                command = [*launch, __file__, "--folder", folder]
                ended = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
            if ended.returncode:
                sys.exit(f"{ranks} ranks ended with code {ended.returncode}: see {log_file}")
            found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("[0-9]*.json"))]
        line = "; ".join(
            f"{k} {mean(f[k] for f in found):.2f} a rank, {sum(f[k] for f in found):.1f} in all" for k in found[0]
        )
        print(f"{ranks} ranks: {line}", flush=True)


if __name__ == "__main__":
    main()
