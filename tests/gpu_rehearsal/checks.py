"""What a rehearsal must show. Each check returns one sentence for each fault."""

from collections.abc import Sequence
from itertools import zip_longest

from tests.gpu_rehearsal.device import Collective
from tests.gpu_rehearsal.trainer import Rehearsal
from torchtitan_rl.sync.checksum import GPU_BLOCK

SYNCS_PER_STEP = 3
"""Times that the host may wait for the device in an optimizer step, however many forwards it has: for the loss with all that is
measured, for other ranks' differences, and for the norms. Raise it only for a good reason: each wait leaves the GPU without work."""
MEMORY = {"update": (0.5, 1.1), "sync": (0.5, 1.1)}
"""Phase -> least and most of the peak, as a share of what run/memory.py predicts. The prediction is an upper bound: a small
model does not fill the largest tiles."""
PUSH = (100, 20, 10)
"""Most kernels of a push: any push's, more for each layer, and more for each `GPU_BLOCK` elements of the model. A launch a tensor or
more, as vLLM's own loading takes, is several times as many."""
MIB = 2**20
SLACK = 100 * MIB
"""Bytes that the prediction may lack besides: index tensors, which only count beside a policy of a few million parameters."""


def faults_of(records: Sequence[Rehearsal]) -> list[str]:
    """Returns the faults of one layout's ranks."""
    first, *others = records
    found = [fault for record in records for fault in _faults_of_rank(record)]
    for other in others:
        found += _order(first, other)
    return found


def _faults_of_rank(record: Rehearsal) -> list[str]:
    found = []
    for one in record.collectives:
        # gloo carries the Python values of comm.py.
        if one.on_cpu and not one.at.startswith("comm.py"):
            found.append(f"a CPU tensor in {one.operator} at {one.at}")
    found += [f"{race} ({size / MIB:.1f} MiB)" for race, size in record.races.items()]
    budget = SYNCS_PER_STEP * record.optimizer_steps + record.routing_waits
    if record.syncs.total() > budget:
        lines = ", ".join(f"{line} x{times}" for line, times in record.syncs.most_common())
        found.append(f"{record.syncs.total()} host synchronisations in an update, the budget is {budget}: {lines}")
    for phase, (least, most) in MEMORY.items():
        peak, predicted = record.peaks[phase], record.predicted[phase]
        if not least * predicted <= peak <= most * predicted + SLACK:
            found.append(f"{phase} peaks at {peak / MIB:.0f} MiB, run/memory.py predicts {predicted / MIB:.0f}")
    found += [f"{name} differs from the CPU's" for name in record.differing]
    most = sum(
        number * factor for number, factor in zip(PUSH, (1, record.layers, record.elements / GPU_BLOCK), strict=True)
    )
    if record.layers and (launched := record.operators["sync"].total()) > most:
        found.append(f"a push launches {launched} kernels, the budget is {most:.0f}")
    for one in record.collectives:
        if len(one.ranks) > 1 and (seconds := record.timeouts.get(one.ranks)) != record.timeout:
            found.append(f"the group of {one.operator} at {one.at} waits {seconds} s, not {record.timeout}")
    if not record.operators["update"]["_fused_adamw_.default"]:
        found.append("the optimizer is not fused")
    return [f"rank {record.rank}: {fault}" for fault in dict.fromkeys(found)]


def _order(one: Rehearsal, other: Rehearsal) -> list[str]:
    """The first collective in which two ranks differ. NCCL would wait for ever, or mix up two results.

    Groups of different ranks, and exchanges of tokens with experts, must only agree in the operator and in size: another
    data-parallel rank has other tokens.
    """
    for number, (a, b) in enumerate(zip_longest(one.collectives, other.collectives)):
        if a is None or b is None or _comparable(a, b) != _comparable(b, a):
            where = [f"{c.operator} of {c.shapes} over {len(c.ranks)} at {c.at}" if c else "none" for c in (a, b)]
            return [f"collective {number}: rank {one.rank} has {where[0]}, rank {other.rank} has {where[1]}"]
    return []


def _comparable(one: Collective, other: Collective) -> tuple:
    alike = one.ranks == other.ranks and one.operator != "all_to_all_single.default"
    return one.operator, len(one.ranks), one.shapes if alike else ()
