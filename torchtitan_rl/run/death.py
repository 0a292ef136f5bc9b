"""Why a process died by a signal, as far as this machine tells: the kernel's log, the control group's counter, its memory."""

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

GIB = 2**30


def out_of_memory_kills() -> int:
    """How many processes the kernel has killed in this process's control group for want of memory; 0 where unreadable."""
    total = 0
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "memory":
                total += _count(Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control"))
            elif controllers == "":
                total += _count(Path(f"/sys/fs/cgroup{path}/memory.events"))
    return total


def _count(file: Path) -> int:
    with suppress(OSError):
        return next((int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith("oom_kill ")), 0)
    return 0


def kernel_says(pid: int, log: str | None = None) -> str:
    """The kernel's own words on having killed `pid` for want of memory; "" where it has none or may not be asked.

    Example: "Out of memory: Killed process 13289 (python) total-vm:25898320kB, anon-rss:23704008kB"
    """
    text = _kernel_log() if log is None else log
    found = re.findall(rf"[^;\n]*Killed process {pid} \([^\n]*?anon-rss:\d+kB", text)
    return found[-1].strip() if found else ""


def _kernel_log() -> str:
    records = []
    with suppress(OSError):
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        try:
            while True:
                records.append(os.read(log, 8192).decode(errors="replace"))
        finally:  # it ends with an error: there is no more for now
            os.close(log)
    return "".join(records)


def explain(pid: int, number: int, *, peak_bytes: int, kills_before: int) -> str:
    """What is known of a process that a signal ended, and what to do.

    Example: "killed by signal 9 (SIGKILL): out of memory, by the kernel's log (...). Its peak was 22.6 of the node's 23.4 GiB.
    Lower ..."
    """
    text = f"killed by signal {number} ({signal.Signals(number).name})"
    peak = f"Its peak was {peak_bytes / GIB:.1f} of the node's {_node_bytes() / GIB:.1f} GiB of memory."
    if number != signal.SIGKILL:
        return f"{text}. {peak}"
    words = kernel_says(pid)
    if words or out_of_memory_kills() > kills_before:
        evidence = f"by the kernel's log ({words})" if words else "by its control group's counter"
        remedy = "Lower num_prompts_per_step, sampling.n or VLLM_CPU_KVCACHE_SPACE, or start fewer ranks on a node."
        return f"{text}: out of memory, {evidence}. {peak} {remedy}"
    return (
        f"{text}. Nothing here tells of too little memory: a person, a batch system or an outer limit sent it. {peak}"
    )


def _node_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
