"""Why a process died by a signal, as far as this machine tells: the kernel's log, the control group's counter, its memory."""

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

GIB = 2**30
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
"""Where control groups are shown, by version; both may be in use, and memory is counted in one of them."""
OWN_GROUPS = Path("/proc/self/cgroup")

TO_LOWER = {
    "generate": "generator.max_num_seqs, grader.workers or, on a CPU, VLLM_CPU_KVCACHE_SPACE (GiB a rank)",
    "grade": "what the reward functions keep, or grader.workers",
    "train": "trainer.max_tokens_per_microbatch",
    "start the vLLM engine": "on a CPU VLLM_CPU_KVCACHE_SPACE (GiB a rank)",
}
"""By the end of the name of the phase in which a rank needed too much memory."""


def out_of_memory_kills() -> int:
    """How many processes the kernel has killed in this process's control group for want of memory; 0 where unreadable."""
    own = _memory_groups()[:1]
    return sum(_count(folder / file) for folder in own for file in ("memory.events", "memory.oom_control"))


def memory_limit() -> int | None:
    """Bytes that this process's control groups let it and its neighbours use together; None for as much as the node has."""
    files = (folder / file for folder in _memory_groups() for file in ("memory.max", "memory.limit_in_bytes"))
    limits = [int(text) for file in files if (text := _read(file).strip()).isdecimal()]
    return min((limit for limit in limits if limit < node_bytes()), default=None)


def _memory_groups() -> list[Path]:
    """The folders of this process's control group for memory and of those around it, innermost first, as far as they are shown.

    In a container the path is often the node's, and the container's own group is shown as the root.
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


def _count(file: Path) -> int:
    return next((int(line.split()[1]) for line in _read(file).splitlines() if line.startswith("oom_kill ")), 0)


def _read(file: Path) -> str:
    """Its text; "" where there is none or it may not be read."""
    try:
        return file.read_text()
    except OSError:
        return ""


class OomDetector:
    """Sees what the kernel kills, from when it is made: an older line of the kernel's log may name another process of the same id."""

    def __init__(self) -> None:
        self._kills_before = out_of_memory_kills()
        self._said = ""
        self._log: int | None = None
        with suppress(OSError):  # where one may not read it
            self._log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._log, 0, os.SEEK_END)

    def explain(self, pid: int, number: int, *, phase: str = "", peak_bytes: int = 0) -> str:
        """What is known of a process that a signal ended, and what to do.

        Example: "killed by signal 9 (SIGKILL): out of memory, by the kernel's log (...). Its peak was 22.6 of the node's 23.4
        GiB of memory. Lower ..."
        """
        text = f"killed by signal {number} ({signal.Signals(number).name})"
        if number != signal.SIGKILL:
            return f"{text}.{_peak(peak_bytes)}"
        peak = _peak(max(peak_bytes, _resident(self._kernel_log(), pid)))
        if evidence := self.out_of_memory(pid):
            return f"{text}: {evidence}.{peak} {_remedy(phase)}"
        return f"{text}. Nothing here tells of too little memory: a person, a batch system or an outer limit sent it.{peak}"

    def out_of_memory(self, pid: int) -> str:
        """How it is known that a dead process was killed for want of memory; "" when nothing here tells of it."""
        if words := kernel_says(pid, self._kernel_log()):
            return f"out of memory, by the kernel's log ({words})"
        counted = out_of_memory_kills() > self._kills_before
        return "out of memory, by its control group's counter" if counted else ""

    def _kernel_log(self) -> str:
        with suppress(OSError):  # it ends with an error: there is no more for now
            while self._log is not None:
                self._said += os.read(self._log, 8192).decode(errors="replace")
        return self._said


def kernel_says(pid: int, log: str) -> str:
    """The kernel's own words on having killed `pid` for want of memory; "" where its log has none.

    Example: "Out of memory: Killed process 13289 (python) total-vm:25898320kB, anon-rss:23704008kB"
    """
    found = re.findall(rf"[^;\n]*Killed process {pid} \([^\n]*?anon-rss:\d+kB", log)
    return found[-1].strip() if found else ""


def _resident(log: str, pid: int) -> int:
    """Bytes that a process had when the kernel killed it; it may have grown fast just before. 0 where the log has none."""
    found = re.search(r"anon-rss:(\d+)kB", kernel_says(pid, log))
    return int(found[1]) * 1024 if found else 0


def _peak(size: int) -> str:
    """What a process had at most, and of what; "" where that is not known."""
    bound = f"the node's {node_bytes() / GIB:.1f} GiB of memory"
    if limit := memory_limit():
        bound = f"the {limit / GIB:.1f} GiB of memory that its control group allows all its processes, and {bound}"
    return f" Its peak was {size / GIB:.1f} of {bound}." if size else ""


def _remedy(phase: str) -> str:
    first = next((f"{what}, " for end, what in TO_LOWER.items() if phase.endswith(end)), "")
    return f"Lower {first}num_prompts_per_step or sampling.n, or start fewer ranks on a node."


def node_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
