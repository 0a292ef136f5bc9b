"""A table of an update's kernels, counted on the pretended device: what each part of it asks of a GPU, and the least time for that.

    python -m tests.gpu_rehearsal.update [CONFIG]    default: qwen3_0_6b, on one GPU

Each operator is a kernel that reads its inputs and writes its outputs once; FLOPs are torch.utils.flop_counter's. Nothing is measured.
"""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

from tests.gpu_rehearsal import trainer as rehearsal

# isort: split
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from tests.gpu_rehearsal.device import Device, _kernels
from tests.gpu_rehearsal.places import place
from tests.gpu_rehearsal.shipped import shipped
from torchtitan_rl.trainer.trainer import Trainer

FLOPS, BYTES = 989e12, 4.8e12
"""Per second of an H200: dense products of bfloat16, and its memory."""
PARTS = (
    "blocks: products",
    "attention",
    "blocks: the rest",
    "head: products",
    "head: the rest",
    "optimizer and clipping",
)


class Tally(Device):
    """Adds up kernels, FLOPs, bytes and least seconds by part."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = {part: Counter() for part in PARTS}

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        before = self.operators.total()
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.operators.total() > before:
            tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
            flops, moved = _flops(func, args, kwargs or {}, out), sum(t.nbytes for t in tensors)
            seconds = max(flops / FLOPS, moved / BYTES)
            bound = "seconds bound by products" if flops / FLOPS > moved / BYTES else "seconds bound by memory"
            number = {"kernels": _kernels(func, tensors), "flops": flops, "bytes": moved}
            self.parts[_part(func, flops)].update({**number, "seconds": seconds, bound: seconds})
        return out


def _flops(func: Callable, args: tuple, kwargs: dict, out: Any) -> float:
    if "varlen_attn" in func.__name__ or "varlen_attn" in str(func):
        backward = "backward" in str(func)
        query, key, lengths = (args[1], args[2], args[6]) if backward else (args[0], args[1], args[3])
        mean = len(query) // max(1, len(lengths) - 1)  # of sequences that are taken to be alike
        shape = (len(lengths) - 1, query.shape[1], mean, query.shape[2])
        return sdpa_flop_count(shape, shape, shape) / 2 * (2.5 if backward else 1)  # causal
    count = flop_registry.get(func._overloadpacket)
    return count(*args, **kwargs, out_val=out) if count else 0


def _part(func: Callable, flops: float) -> str:
    at = place()
    if "attn" in str(func):
        return "attention"
    if at.startswith("models/logprobs.py"):
        return "head: products" if flops else "head: the rest"
    if any(name in func.__name__ for name in ("adamw", "_foreach", "norm.Scalar")):
        return "optimizer and clipping"
    return "blocks: products" if flops else "blocks: the rest"


def main(name: str = "qwen3_0_6b") -> None:
    """Print the table of a config's last update of one micro-batch."""
    tallies: list[Tally] = []
    counts: dict[str, Counter] = {}
    update = Trainer.update

    def counted(trainer: Trainer, *arguments: Any) -> Any:
        tallies[0].parts = {part: Counter() for part in PARTS}
        report = update(trainer, *arguments)
        counts.update(tallies[0].parts)
        tallies[0].parts = {part: Counter() for part in PARTS}
        return report

    def tally() -> Tally:
        tallies.append(Tally())
        return tallies[0]

    config, layout = shipped(name), rehearsal.Layout(1)
    rehearsal.on_layout(config, layout)
    tokens, longest = config.trainer.max_tokens_per_microbatch, config.sampling.max_tokens
    prompts = max(2, tokens // (3 * longest))
    with mock.patch.object(rehearsal, "Device", tally), mock.patch.object(Trainer, "update", counted):
        record = rehearsal.rehearse(config, layout, 0, prompts=prompts, longest=longest, updates=1)
    print(f"{name}: {prompts} prompts of 4 completions, {record.forwards} forwards")
    print("| part | kernels | TFLOP | GB | least ms | of it bound by memory |\n|---|---|---|---|---|---|")
    for part, one in counts.items():
        memory = one["seconds bound by memory"] / max(one["seconds"], 1e-9)
        cells = (
            f"{one['kernels']:,}",
            f"{one['flops'] / 1e12:.1f}",
            f"{one['bytes'] / 1e9:.1f}",
            f"{1e3 * one['seconds']:.1f}",
        )
        print("| " + " | ".join((part, *cells, f"{memory:.0%}")) + " |")


if __name__ == "__main__":
    main(*sys.argv[1:])
