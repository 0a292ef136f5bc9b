"""The kernel's out-of-memory killer itself, in a control group with a limit of its own: nothing else on the machine is hurt."""

import contextlib
import os
import time
from pathlib import Path

import pytest

from tests.fault_injection.harness import start, steps_of

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
STEPS = ["--num-steps", "4", "--checkpoint.interval", "1"]
EATS = ["--grader.rewards", "tests/fault_injection/rewards.py:eats", "--grader.in-process", "eats"]


class MemoryGroup:
    """A control group: what is started with `prefix` is in it, and may together use what `limit` says."""

    def __init__(self, folder):
        self.folder = folder
        self.prefix = ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh"]
        v2 = (folder / "memory.max").exists()
        self._limit, self._used = (
            ("memory.max", "memory.current") if v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )

    def limit(self, *, more_bytes):
        """Allow this much more than is used now."""
        used = int((self.folder / self._used).read_text())
        (self.folder / self._limit).write_text(str(used + more_bytes))


@pytest.fixture
def memory_group():
    """A new one, of whichever version of control groups this machine has."""
    folder = (V1 if V1.is_dir() else V2) / f"torchtitan_rl-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"needs the right to make a memory control group: {error}")
    try:
        if not any((folder / file).exists() for file in ("memory.max", "memory.limit_in_bytes")):
            pytest.skip(f"the control groups of {folder.parent} do not limit memory")
        yield MemoryGroup(folder)
    finally:
        remove(folder)


def remove(folder):
    """Once the kernel is done with what was in it, which is a moment after the last process has ended."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (folder / "cgroup.procs").exists():
        with contextlib.suppress(OSError):
            folder.rmdir()
        time.sleep(0.1)
    assert not folder.exists()


def test_rank_killed_for_out_of_memory_is_reported_with_settings_to_lower(tmp_path, memory_group):
    run = start(tmp_path, *STEPS, *EATS, ranks=2, prefix=memory_group.prefix, BAD_RANK="1")
    run.wait_until(lambda: steps_of(tmp_path / "run"), "save")
    memory_group.limit(more_bytes=2**29)
    ended = run.end(60)
    assert ended.code == 137
    ended.says(
        r"rank 1 \(.*\) in step 2: grade was killed by signal 9 \(SIGKILL\): out of memory, by (the kernel|its control group)'s",
        r"Its peak was \d\.\d of the \d\.\d GiB of memory that its control group allows all its processes",
        r"Lower trainer.max_tokens_per_microbatch, .*--dump-folder .* goes on after step-1\.",
    )
    ended.never_says("Traceback", "gloo")
    assert run.left() == {}
