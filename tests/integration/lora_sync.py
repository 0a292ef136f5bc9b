"""Adapters in trainer and engine, on any layout: equal after three pushes, and every wrong adapter is named at the first push.

python -m torchtitan_rl.run.launch --standalone --nproc_per_node=2 -m tests.integration.lora_sync --generator-tp 2
python -m torchtitan_rl.run.launch --standalone --nproc_per_node=1 -m tests.integration.lora_sync --family granite
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from torchtitan_rl import device  # noqa: F401

# isort: split
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torchtitan.config import CommConfig  # noqa: E402

from tests.integration.parity import BOUNDS  # noqa: E402
from tests.parts.hf_decoders import HF_FAMILIES, save_hf_family  # noqa: E402
from tests.parts.lora import LORA, A, AdapterPair, B  # noqa: E402
from tests.parts.tiny import change_adapters, save_tiny_checkpoint  # noqa: E402
from torchtitan_rl import comm  # noqa: E402
from torchtitan_rl.models.lora.lora_config import LoraConfig  # noqa: E402
from torchtitan_rl.sync.in_process import OTHER_VALUES  # noqa: E402
from torchtitan_rl.sync.weight_sync import NOT_SENT, WeightSyncError  # noqa: E402

Adapter = dict[str, torch.Tensor]
BASE = "model.layers.1.mlp.down_proj.weight"


def sabotages(pair: AdapterPair, old: Adapter) -> Iterator[tuple[str, str, Callable[[Adapter], Adapter]]]:
    """(what is wrong, what the error says, how it comes about). `old` is the adapter of the push before."""
    other = B.replace("layers.1", "layers.0")
    first = next(iter(old))
    yield "stale", f"policy's: {first} {OTHER_VALUES}", lambda new: {name: t.clone() for name, t in old.items()}
    yield (
        "one layer stale",
        f"policy's: {A} {OTHER_VALUES}; {B} {OTHER_VALUES}",
        lambda new: new | {n: old[n].clone() for n in (A, B)},
    )
    yield "scale x 1.01", f"policy's: {B} {OTHER_VALUES}", lambda new: new | {B: new[B] * 1.01}
    yield "A with another layer's B", f"{B} {OTHER_VALUES}", lambda new: new | {B: new[other], other: new[B]}
    yield "dropped", f"{A} {NOT_SENT}", lambda new: {name: t for name, t in new.items() if name != A}
    yield "zeros", f"policy's: {A} {OTHER_VALUES}", lambda new: new | {A: torch.zeros_like(new[A])}
    yield "base changed underneath", f"policy's: {BASE} {OTHER_VALUES}", changed_base(pair)


def changed_base(pair: AdapterPair) -> Callable[[Adapter], Adapter]:
    """Change one element of the engine's base between two pushes: the parameter, or on a CPU the packed copy's source."""

    def sabotaged(new: Adapter) -> Adapter:
        base = dict(pair.weights())
        base[BASE] = base[BASE].clone()
        base[BASE][3, 5] += 0.5
        pair.generator.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(base.items())})
        return new

    return sabotaged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--generator-tp", type=int, default=1)
    parser.add_argument("--dtype", choices=list(BOUNDS), default="float32")
    parser.add_argument("--rank", type=int, default=LORA.rank, help="1 leaves a rank of FSDP 2 without rows of A")
    parser.add_argument("--family", choices=list(HF_FAMILIES), help="one with transformers' layers; default: a Qwen3")
    parser.add_argument("--targets", nargs="+", default=LORA.targets, help="with qkv_proj and down_proj")
    args = parser.parse_args()
    comm.init_process_group(CommConfig(trace_buf_size=0))
    folder = comm.broadcast(tempfile.mkdtemp() if dist.get_rank() == 0 else "")
    if dist.get_rank() == 0:
        positions = {"max_position_embeddings": 384}
        save_hf_family(Path(folder), args.family, **positions) if args.family else save_tiny_checkpoint(Path(folder))
    dist.barrier()
    lora = LoraConfig(rank=args.rank, alpha=LORA.alpha, targets=tuple(args.targets))
    pair = AdapterPair(Path(folder), dtype=args.dtype, tp=args.tp, generator_tp=args.generator_tp, lora=lora)
    most, rows = 1e-5 if args.dtype == "float32" else BOUNDS[args.dtype][1], []
    for version in range(1, 4):
        change_adapters(pair.model, version)
        pair.sync()
        diff = pair.worst_diff(version)
        rows.append((diff < most, f"engine = policy after push {version}", f"{diff:.1e}"))
    old = {name: t.clone() for name, t in pair.sent().items()}
    for what, says, how in sabotages(pair, old):
        pair.begin_anew()
        change_adapters(pair.model, 3)
        pair.sync()
        change_adapters(pair.model, 4)
        try:
            pair.sync(how(pair.sent()))
            said = "nothing"
        except WeightSyncError as error:
            said = str(error)
        rows.append((says in said, what, said[:200]))
    if dist.get_rank() == 0:
        layout = f"{dist.get_world_size()} ranks, trainer TP {args.tp}, engine TP {args.generator_tp}, {args.dtype}"
        layout += f", rank {args.rank} of {', '.join(args.targets)}"
        print(layout)
        for holds, what, said in rows:
            print(f"{'ok    ' if holds else 'FAILED'}  {what:32} {said}")
    comm.barrier()
    pair.generator.close()
    comm.close_process_group()
    sys.exit(not all(holds for holds, *_ in rows))


if __name__ == "__main__":
    main()
