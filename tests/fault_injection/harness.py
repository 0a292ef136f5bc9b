"""Drives real runs and does something to them: the parts that every fault test is made of.

A run is started by `start`, watched by `wait_for` a line or by `phase_of` its ranks, hurt by signals to its ranks (`pids`) or by
what happens to its files, and ends in `Ended`: its exit code, all that it printed, its seconds. What it computed is compared by
`weights_of`: the digests of its last checkpoint's values, so that equal means equal in every bit.
"""

import functools
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_rl.run.rank_status import WATCH_VARIABLE, RankStatus, read_statuses

ROOT = Path(__file__).resolve().parents[2]
QUICK = [
    "--evaluation.every", "0", "--num-prompts-per-step", "4", "--sampling.n", "4", "--metrics.sinks", "jsonl", "--metrics.no-report",
]  # fmt: skip
"""Steps of a tenth of a second: most of such a run is its start."""


@dataclass
class Ended:
    """How a run ended."""

    code: int
    output: str
    seconds: float
    """From the fault, where there was one, to the end."""

    def says(self, *patterns: str) -> None:
        """Assert that each pattern (a regular expression) is found in what was printed."""
        for pattern in patterns:
            assert re.search(pattern, self.output), f"{pattern!r} is not in:\n{self.output[-4000:]}"

    def never_says(self, *patterns: str) -> None:
        """Assert that no pattern is found in what was printed."""
        for pattern in patterns:
            assert not re.search(pattern, self.output), f"{pattern!r} is in:\n{self.output[-4000:]}"


class Run:
    """A started run; its output goes to `log`."""

    def __init__(self, process: subprocess.Popen, log: Path) -> None:
        self.process = process
        self.log = log
        self.hurt_at = time.monotonic()
        self._watch: str | None = None

    @property
    def output(self) -> str:
        """What was printed so far."""
        return self.log.read_text(errors="replace")

    def wait_for(self, pattern: str, timeout_s: float = 240) -> float:
        """Seconds until a line matches; an AssertionError when the run ends or the time is over before."""
        return self.wait_until(lambda: re.search(pattern, self.output), f"print {pattern!r}", timeout_s)

    def wait_until(self, holds: Callable[[], object], what: str, timeout_s: float = 240) -> float:
        """Seconds until `holds()`; an AssertionError when the run ends or the time is over before."""
        began = time.monotonic()
        while not holds():
            assert self.process.poll() is None, (
                f"ended with {self.process.returncode} and did not {what}:\n{self.output}"
            )
            assert time.monotonic() - began < timeout_s, f"did not {what} in {timeout_s} s:\n{self.output}"
            time.sleep(0.005)
        return time.monotonic() - began

    def statuses(self) -> dict[int, RankStatus]:
        """Where each rank says that it is, by rank; {} before the launcher watches."""
        if self._watch is None:
            marked = processes_with(f"{MARK}={id_of(self.log)}").values()
            self._watch = next(
                (environment[WATCH_VARIABLE] for environment in marked if WATCH_VARIABLE in environment), None
            )
        folder = Path(self._watch) if self._watch else None
        return {status.rank: status for status in read_statuses(folder)}

    def wait_in(self, phase: str, rank: int = 0, timeout_s: float = 240) -> None:
        """Wait until a rank is in a phase whose name ends so: "grade", "checkpoint/save", "start the vLLM engine"."""
        self.wait_until(
            lambda: any(p.rank == rank and p.phase.endswith(phase) for p in self.statuses().values()),
            f"come to {phase!r}",
            timeout_s,
        )

    def everything(self) -> dict[int, str]:
        """Every process of the run that lives, its children's children too: command lines by process id."""
        marked = processes_with(f"{MARK}={id_of(self.log)}")
        return {pid: Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in marked}

    def left(self) -> dict[int, str]:
        """What still lives of a run that has ended, after 5 s for what ends last."""
        give_up = time.monotonic() + 5
        while (found := self.everything()) and time.monotonic() < give_up:
            time.sleep(0.1)
        return found

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one rank, or (None) to the launcher."""
        os.kill(self.process.pid if rank is None else self.statuses()[rank].pid, number)
        self.hurt_at = time.monotonic()

    def kill_everything(self) -> Ended:
        """End all processes of the run at once, as a machine that loses power does."""
        for pid in self.everything():
            kill(pid)
        return self.end(60)

    def end(self, timeout_s: float = 300) -> Ended:
        """Wait for the end; an AssertionError, after killing it, when it does not come in time."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            for pid in self.everything():
                kill(pid)
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output}") from None
        return Ended(code if code >= 0 else 128 - code, self.output, time.monotonic() - self.hurt_at)


MARK = "FAULT_INJECTION_RUN"
"""The environment variable by which a run's processes are found, whatever they are and whoever their parent is now."""


def start(
    folder: Path,
    *args: str,
    ranks: int = 1,
    log: str = "run.log",
    launcher: Sequence[str] = (),
    prefix: Sequence[str] = (),
    base: Sequence[str] = tuple(QUICK),
    **env: str,
) -> Run:
    """Start a training run in `folder`/run on `ranks` ranks.

    `launcher`: torchrun's arguments; `prefix`: a command before. `base`: the first arguments of the run, without its config, which
    is `debug` where `args` name none.
    """
    if base == tuple(QUICK):
        make_start()
    command = [*prefix, sys.executable, "-m", "torchtitan_rl.run.launch", *(launcher or ["--standalone"])]
    command += [f"--nproc_per_node={ranks}", "-m", "torchtitan_rl.command.train", *base]
    if "--config" not in (*base, *args):
        command += ["--config", "debug"]
    if "--dump-folder" not in args:
        command += ["--dump-folder", str(folder / "run")]
    return spawn([*command, *args], folder / log, **env)


def spawn(command: Sequence[str], log: Path, **env: str) -> Run:
    """Start a command whose processes can be found, wherever they go."""
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1",
        MARK: id_of(log), **env,
    }  # fmt: skip
    streams = {"stdout": log.open("w"), "stderr": subprocess.STDOUT}
    return Run(subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **streams), log)


def two_nodes() -> tuple[list[list[str]], int]:
    """The launcher's arguments on two nodes, as two pods have them, and the port at which they meet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = ["--nnodes=2", "--master_addr=127.0.0.1", f"--master_port={port}"]
    return [[f"--node_rank={node}", *common] for node in range(2)], port


@functools.cache
def make_start() -> None:
    """Make debug's starting checkpoint where it is missing, however long that takes: no test waits for it."""
    code = (
        "from torchtitan_rl import device; from torchtitan_rl.command.registry import load_config; "
        "from torchtitan_rl.run.start_checkpoint import prepare_start; prepare_start(load_config('debug'))"
    )
    # As the launcher sets it: on a busy machine threads that spin while they wait take five times as long.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)


def copy_until(run: Path, step: int, to: Path) -> Path:
    """A run folder as it was after `step`, of one that kept all its checkpoints; returns its new place, `to`/run."""
    shutil.copytree(run, to / "run")
    for later in steps_of(to / "run"):
        if later > step:
            shutil.rmtree(to / "run" / "checkpoint" / f"step-{later}")
    return to / "run"


def train(folder: Path, *args: str, timeout_s: float = 300, **more: Any) -> Ended:
    """Run to the end; `more` as in `start`."""
    return start(folder, *args, **more).end(timeout_s)


def id_of(log: Path) -> str:
    """A run's name among all processes of the machine."""
    return hashlib.sha256(str(log.resolve()).encode()).hexdigest()[:16]


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal a process that may be gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def processes_with(entry: str) -> dict[int, dict[str, str]]:
    """Environments by process id of every living process that was started with this entry in its own."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            dead = (folder / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            continue
        if entry in entries and not dead:
            found[int(folder.name)] = dict(e.split("=", 1) for e in entries if "=" in e)
    return found


def weights_of(run: Path, step: int) -> dict[str, str]:
    """Digests of every value in a checkpoint, tensors and all: equal for equal bits, on one and the same layout."""
    from torchtitan_rl import device  # noqa: F401, I001
    import torch
    from torchtitan_rl.run.safe_load import SafeReader

    folder = run / "checkpoint" / f"step-{step}"
    found = {}
    for index, place in SafeReader(str(folder)).read_metadata().storage_data.items():
        with open(folder / place.relative_path, "rb") as file:
            file.seek(place.offset)
            content = file.read(place.length)
        found[f"{index.fqn} {index.offset or ''}"] = _value_digest(content, torch)
    return found


def _value_digest(content: bytes, torch) -> str:
    import io

    value = torch.load(io.BytesIO(content), weights_only=True)
    if isinstance(value, str) and value.startswith("{"):
        value = json.loads(value)
        value.get("recorder", {}).pop("prints", None)  # of measured seconds too, which no two runs share
    if isinstance(value, torch.Tensor):
        content = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() + str(value.dtype).encode()
    else:
        content = repr(value).encode()
    return hashlib.sha256(content).hexdigest()


def metrics_of(run: Path) -> dict[int, dict[str, float]]:
    """metrics.jsonl by step; a step written twice is an AssertionError."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len({row["step"] for row in rows}) == len(rows), f"twice: {[row['step'] for row in rows]}"
    return {row["step"]: row for row in rows}


def steps_of(run: Path) -> list[int]:
    """The steps of the checkpoints on the disk, half written ones left out."""
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoint").glob("step-*"))
