"""How much memory there is, and what to lower when it runs out."""

import os
from contextlib import suppress
from pathlib import Path

CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where a container sees its control group's limit, by version."""

MEMORY_REMEDY = (
    "Lower trainer.max_tokens_per_microbatch, num_prompts_per_step, sampling.n, grader.workers or, on a CPU, VLLM_CPU_KVCACHE_SPACE "
    "(GiB a rank), or start fewer ranks on a node."
)


def usable_bytes() -> int:
    """Memory that the processes here may use, in bytes: the container's limit or the machine's."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in CONTAINER_LIMITS:
        with suppress(OSError, ValueError):  # there is none, or it is "max"
            sizes.append(int(Path(file).read_text()))
    return min(sizes)
