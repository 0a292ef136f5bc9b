"""What a checkpoint costs: saving it, the share of its digests, plain DCP's time, verifying and loading it, and what saving in
the background would leave.

    .venv/bin/python -m scripts.bench.checkpoint [--gigabytes 2.0] [--folder FOLDER]

One process; weights and two moments in float32, as a policy of (gigabytes / 12 bytes) parameters has them. Medians of three.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torchtitan_rl.core import device  # noqa: F401

# isort: split
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402

from torchtitan_rl.resilience import manifest  # noqa: E402
from torchtitan_rl.resilience.checkpointer import Checkpointer  # noqa: E402
from torchtitan_rl.resilience.manifest import examine  # noqa: E402

LAYERS = 24
REPEATS = 3


class Tensors:
    """A part of a run's state: tensors alone."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.tensors = state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default a temporary one")
    args = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        measure(folder, int(args.gigabytes * 1e9 / 12))
    finally:
        shutil.rmtree(folder)
    dist.destroy_process_group()


def measure(folder: Path, parameters: int) -> None:
    """Print one line for each figure."""
    model = torch.nn.ParameterList(torch.randn(parameters // LAYERS) for _ in range(LAYERS))
    moments = Tensors({f"{i}.{kind}": torch.randn_like(p) for i, p in enumerate(model) for kind in ("m", "v")})
    none = Tensors({})
    saver = Checkpointer.Config(interval=1, keep_latest_k=1).build(
        trainer=SimpleNamespace(model=model, optimizer=moments, scheduler=none),
        prompts=none,
        run_state=none,
        run_folder=folder,
    )
    state: dict[str, Any] = {"optimizer": moments, **saver.model.state_dict()}
    steps = iter(range(1, 100))
    times = {
        "saved, whole": timed(lambda: saver.save(next(steps))),
        "  of it SHA-256": timed(lambda: manifest.describe(files(saver))),
        "plain DCP": timed(lambda: dcp.save(state, checkpoint_id=str(folder / f"plain-{next(steps)}"))),
        "verified on resume": timed(lambda: examine(saver.folder.newest())),
        "loaded": timed(lambda: saver.load(saver.folder.newest())),
    }
    waits, written = background(state, folder)
    times |= {"in the background: the step waits": waits, "in the background: until written": written}
    print(f"{sum(file.stat().st_size for file in files(saver)) / 1e9:.3f} GB on the disk")
    for name, seconds in times.items():
        print(f"{name:36} {seconds:7.2f} s")


def files(saver: Checkpointer) -> list[Path]:
    return sorted(saver.folder.newest().glob("*.distcp"))


def timed(act: Callable[[], object]) -> float:
    """Median of seconds."""
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def background(state: dict[str, Any], folder: Path) -> tuple[float, float]:
    """Seconds that dcp.async_save keeps its caller, which copies the state, and until all is written."""
    begin = time.perf_counter()
    written = dcp.async_save(state, checkpoint_id=str(folder / "background"))
    waited = time.perf_counter() - begin
    written.result()
    return waited, time.perf_counter() - begin


if __name__ == "__main__":
    main()
