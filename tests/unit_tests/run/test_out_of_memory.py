"""What is said of a process that a signal ended, from the control groups as machines show them."""

import signal

import pytest

from torchtitan_rl.run import out_of_memory

GIB = 2**30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine whose control groups are what this function writes: {file: its text}."""
    monkeypatch.setattr(out_of_memory, "V1", tmp_path / "memory")
    monkeypatch.setattr(out_of_memory, "V2", tmp_path)
    monkeypatch.setattr(out_of_memory, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(out_of_memory, "node_bytes", lambda: 24 * GIB)

    def show(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return show


@pytest.mark.parametrize(
    "files",
    [
        {"own": "4:memory:/job\n0::/\n", "memory/job/memory.oom_control": "under_oom 0\noom_kill 2\n"},
        {"own": "0::/job\n", "job/memory.events": "oom 5\noom_kill 2\n", "memory.stat": ""},
        {"own": "4:memory:/docker/5f\n", "memory/memory.oom_control": "oom_kill 2\n"},
    ],
    ids=["version 1", "version 2", "a container that is shown its own group as the root"],
)
def test_cgroup_counter_distinguishes_out_of_memory_kills(machine, files):
    machine(files)
    detector = out_of_memory.OomDetector()
    assert "There is no sign of an out-of-memory kill" in detector.explain(signal.SIGKILL)
    machine({name: text.replace("oom_kill 2", "oom_kill 3") for name, text in files.items()})
    assert detector.explain(signal.SIGKILL).startswith(
        "killed by signal 9 (SIGKILL): out of memory, by its control group's counter."
    )


@pytest.mark.parametrize(
    "files",
    [
        {"own": "4:memory:/pod/job\n", "memory/pod/memory.limit_in_bytes": "6442450944\n",
         "memory/pod/job/memory.limit_in_bytes": "9223372036854771712\n"},
        {"own": "0::/pod/job\n", "pod/memory.max": "6442450944\n", "pod/job/memory.max": "max\n"},
    ],
    ids=["version 1", "version 2"],
)  # fmt: skip
def test_peak_is_compared_with_the_smallest_limit(machine, files):
    machine(files)
    told = (
        "Its peak was 3.0 of the 6.0 GiB of memory that its control group allows all its processes, and the node's 24.0"
    )
    assert told in out_of_memory.OomDetector().explain(signal.SIGKILL, peak_bytes=3 * GIB)
    assert out_of_memory.usable_bytes() == 6 * GIB


@pytest.mark.parametrize(("number", "name"), [(35, "SIGRTMIN+1"), (64, "SIGRTMAX"), (33, "SIGRTMIN-1")])
def test_real_time_signal_is_named(machine, number, name):
    assert out_of_memory.OomDetector().explain(number) == f"killed by signal {number} ({name})."
