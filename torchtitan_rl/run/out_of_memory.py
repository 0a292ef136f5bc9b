"""Finds out why a signal killed a process, from the control group's counter and the process's memory."""

import os
import signal
from pathlib import Path

from torchtitan_rl.run.job_processes import signal_name

GIB = 2**30
REFUSED_MEMORY = ("can't allocate memory", "Cannot allocate memory")
"""Parts of the messages of PyTorch and of the system when they get no memory. Python raises MemoryError."""
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
"""Where control groups are mounted, by version. Both may be in use; one of them counts memory."""
OWN_GROUPS = Path("/proc/self/cgroup")

MEMORY_REMEDY = (
    "Lower trainer.max_tokens_per_microbatch, num_prompts_per_step, sampling.n, grader.workers or, on a CPU, VLLM_CPU_KVCACHE_SPACE "
    "(GiB a rank), or start fewer ranks on a node."
)


def out_of_memory_kills() -> int:
    """Number of out-of-memory kills in this process's control group; 0 if it cannot be read."""
    own = _memory_groups()[:1]
    return sum(
        _count(folder / file) for folder in own for file in ("memory.events", "memory.oom_control")
    )


def memory_limit() -> int | None:
    """Memory limit of this process's control groups, in bytes; None if they do not limit it below the node's memory."""
    files = (
        folder / file
        for folder in _memory_groups()
        for file in ("memory.max", "memory.limit_in_bytes")
    )
    limits = [int(text) for file in files if (text := _read(file).strip()).isdecimal()]
    return min((limit for limit in limits if limit < node_bytes()), default=None)


def _memory_groups() -> list[Path]:
    """The readable folders of this process's memory control group and of its parents, innermost first.

    In a container the path is often the node's, while the container's own group is mounted as the root.
    """
    found = []
    for line in _read(OWN_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        root = V1 if controllers == "memory" else V2
        if controllers in ("memory", ""):
            own = root / path.lstrip("/")
            around = [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
            found += [folder for folder in around if any(folder.glob("memory.*"))]
    return found


def has_no_memory(error: BaseException) -> bool:
    """Whether an error says that this process was refused memory of the host."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in REFUSED_MEMORY)


def _count(file: Path) -> int:
    return next(
        (int(line.split()[1]) for line in _read(file).splitlines() if line.startswith("oom_kill ")),
        0,
    )


def _read(file: Path) -> str:
    """The text of a file; "" if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""


class OomDetector:
    """Detects out-of-memory kills since it was created, by the counter of this process's control group.

    The kernel counts every process of the group that it kills, whether the group's memory or the node's ran out.
    """

    def __init__(self) -> None:
        self._kills_before = out_of_memory_kills()

    def explain(self, number: int, *, peak_bytes: int = 0) -> str:
        """Describe how a signal ended a process, with the evidence, its peak memory and a remedy.

        Example: "killed by signal 9 (SIGKILL): out of memory, by its control group's counter. Its peak was 22.6 of the node's 23.4
        GiB of memory. Lower ..."
        """
        text, peak = f"killed by signal {number} ({signal_name(number)})", _peak(peak_bytes)
        if number != signal.SIGKILL:
            return f"{text}.{peak}"
        if evidence := self.out_of_memory():
            return f"{text}: {evidence}.{peak} {MEMORY_REMEDY}"
        return f"{text}. There is no sign of an out-of-memory kill: a person, a batch system or an outer limit sent the signal.{peak}"

    def out_of_memory(self) -> str:
        """Evidence that a process was killed because memory ran out; "" if there is none."""
        counted = out_of_memory_kills() > self._kills_before
        return "out of memory, by its control group's counter" if counted else ""


def _peak(size: int) -> str:
    """A process's peak memory and the limit, as text; "" if `size` is 0."""
    bound = f"the node's {node_bytes() / GIB:.1f} GiB of memory"
    if limit := memory_limit():
        bound = f"the {limit / GIB:.1f} GiB of memory that its control group allows all its processes, and {bound}"
    return f" Its peak was {size / GIB:.1f} of {bound}." if size else ""


def usable_bytes() -> int:
    """Memory that the processes here may use, in bytes: the control group's limit, as in a container, or the machine's."""
    return memory_limit() or node_bytes()


def node_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
