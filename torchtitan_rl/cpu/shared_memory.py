"""The memory that the ranks of one CPU engine share."""

from collections.abc import Sequence
from pathlib import Path


def unlink_shared_memory(ranks: Sequence[int], rank_in_replica: int) -> None:
    """Remove the name of the memory that this rank of an engine shares with the other `ranks`. Existing mappings stay valid.

    vLLM derives the name from the ranks alone and fails if it exists, so a killed run would block every later one on this
    machine.
    """
    ending = f"-[{'-'.join(map(str, ranks))}]-cpushm_{rank_in_replica}"
    for path in Path("/dev/shm").glob("*-cpushm_*"):
        if path.name.endswith(ending):
            path.unlink(missing_ok=True)
