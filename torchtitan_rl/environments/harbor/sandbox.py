"""Sandboxes: a container of docker or podman, or bubblewrap with this machine's /usr."""

import functools
import json
import logging
import math
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import join, quote, split
from typing import Literal

from torchtitan.config import Configurable

from torchtitan_rl.environments.checks import checked_reward, described
from torchtitan_rl.environments.harbor.task_folder import LeftOut, TaskFolder
from torchtitan_rl.errors import UserError
from torchtitan_rl.fields.number import number

logger = logging.getLogger(__name__)

KEPT = 16_000
"""Bytes kept of the beginning, and of the end, of what a command prints."""
OWN_SECONDS = 120.0
"""Time limit of what a sandbox does for itself, such as a copy."""
_SCRIPTS = {
    "tests": ("/tests/test.sh", "verifier", "verifier", "/logs/verifier/test-stdout.txt"),
    "solution": ("/solution/solve.sh", "agent", "solution", "/logs/agent/oracle.txt"),
}
"""By folder: its script, the sections of task.toml with its time limit and its variables, and its log."""
_LOGS = "mkdir -p /logs/agent /logs/verifier /logs/artifacts"
_NOBODY = "setpriv --reuid=65534 --regid=65534 --clear-groups"


@dataclass(kw_only=True, slots=True)
class SandboxConfig(Configurable.Config):
    """Where commands run, and their limits. A task may ask for less memory and storage."""

    engine: Literal["auto", "docker", "podman", "bubblewrap"] = "auto"
    """auto: the first one that is here. bubblewrap shows this machine's /usr, so tasks that need other images are left out."""

    network: bool = False
    """With docker or podman, give commands and tests a network unless the task forbids it. Without one, tasks whose tests
    or solution install something are left out."""

    memory_mb: int = number(2048, least=16)
    """Most memory of a container, or of each process in bubblewrap, in MB."""

    storage_mb: int = number(1024, least=1)
    """Most that a sandbox of bubblewrap writes, in MB of this machine's memory."""

    command_seconds: float = number(60.0, least=1)
    """Time limit of a command, in seconds. All commands of an attempt together have task.toml's agent.timeout_sec."""


class Sandbox(ABC):
    """Runs the commands of one attempt at a task. Files, and processes left behind, stay until `close`."""

    def __init__(self, task: TaskFolder, config: SandboxConfig) -> None:
        self.task, self.config = task, config
        self._left = task.get("agent", "timeout_sec") or math.inf

    @abstractmethod
    def command(self, seconds: float, variables: Mapping[str, str]) -> list[str]:
        """Returns a command that runs in the sandbox the shell command appended to it."""

    @abstractmethod
    def close(self) -> None:
        """Ends all processes and removes all files."""

    def bash(self, command: str) -> str:
        """Runs a command of the policy. Returns what it printed, and its exit code if that is not 0."""
        seconds, began = min(self._left, self.config.command_seconds), time.monotonic()
        if seconds < 1:
            raise TimeoutError("the time for this task is over")
        code, printed = self.run(command, seconds)
        self._left -= time.monotonic() - began
        return f"{printed}\n(exit code {code})".lstrip() if code else printed or "(no output)"

    def reward(self) -> float:
        """Runs the tests and returns their reward as Harbor reads it: that of reward.json, or else of reward.txt.

        Tests that leave none, or take too long, give 0. Their exit code does not count.
        """
        self.run("rm -rf /logs/verifier/reward.txt /logs/verifier/reward.json")
        printed = self.run_script("tests")
        _, text = self.run("cd /logs/verifier; cat reward.json 2> /dev/null || cat reward.txt")
        try:
            return read_reward(text if printed.startswith("ended") else "the tests took too long")
        except (ValueError, TypeError, KeyError) as error:
            name, reason = self.task.folder.name, described(error)
            logger.warning(f"The tests of {name} gave no reward, so 0: {reason}. {printed}")
            return 0.0

    def run_script(self, folder: Literal["tests", "solution"]) -> str:
        """Runs the script in a folder of the task. Returns "ended" and the end of its log, or neither if it took too long."""
        script, limited, section, log = _SCRIPTS[folder]
        self.put(self.task.folder / folder, f"/{folder}")
        command = f"chmod +x {script}; ({script}) > {log} 2>&1; echo ended; tail -c 300 {log}"
        seconds = self.task.get(limited, "timeout_sec") or 600.0
        return self.run(command, seconds, self.task.variables(section))[1]

    def run(
        self, command: str, seconds: float = OWN_SECONDS, variables: Mapping[str, str] = {}
    ) -> tuple[int, str]:
        """Runs a shell command. Returns its exit code, 124 or 137 if it took longer than `seconds`, and what it printed."""
        limited = f"timeout -k 1 {seconds:.0f} bash -c {quote(command)} 2>&1"
        limited += f" | {{ head -c {KEPT}; tail -c {KEPT}; }}; exit ${{PIPESTATUS[0]}}"
        try:
            done = _run([*self.command(seconds, variables), limited], seconds + 10)
        except subprocess.TimeoutExpired:  # a process that was left behind may still print
            return 124, ""
        return done.returncode, done.stdout

    def put(self, folder: Path, target: str) -> None:
        """Copies the files in a folder into a folder of the sandbox. Raises LeftOut if that fails."""
        pack = f"tar --create --owner=0 --group=0 --directory={quote(str(folder))} ."
        unpack = f"mkdir -p {target} && tar -x -o -C {target}"
        command = join([*self.command(OWN_SECONDS, {"PWD": "/"}), unpack])
        _output(["sh", "-c", f"{pack} | {command}"], f"whose {folder.name} was not copied")


class Bubblewrap(Sandbox):
    """The task's files, in memory, beside this machine's /usr, which is read only. There is no network.

    Memory and CPU time are limited for each process; storage and the number of processes for all together.
    """

    def __init__(self, task: TaskFolder, config: SandboxConfig) -> None:
        super().__init__(task, config)
        self._memory = task.megabytes("memory", config.memory_mb) * 2**20
        self._variables = {"PATH": "/usr/local/bin:/usr/bin:/usr/sbin", "HOME": "/root"}
        user = split(_NOBODY) if os.geteuid() == 0 else []
        script, pipe = task.build_script(), subprocess.PIPE
        holder = [*user, *_bubblewrap(task.megabytes("storage", config.storage_mb))]
        self._holder = subprocess.Popen(holder, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT)
        if (said := self._holder.stdout.readline().decode()) != "ready\n":
            raise LeftOut(f"for which bubblewrap did not start ({said.strip()})")
        pid = self._holder.pid
        self._first = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
        enter = f"nsenter --target={self._first} --preserve-credentials --user"
        self._enter = [*user, *split(enter)]
        try:
            # In a user namespace of its own a process could mount more memory.
            forbid = [*self._enter, "sh", "-c", "echo 0 > /proc/sys/user/max_user_namespaces"]
            _output(forbid, "for which bubblewrap was not limited")
            if (task.folder / "environment").is_dir():
                self.put(task.folder / "environment", "/.context")
            code, printed = self.run(script, task.get("environment", "build_timeout_sec", 600.0))
            if code:
                raise LeftOut(f"whose Dockerfile failed ({printed.strip()[-200:]})")
            of_image = dict(line.split("=", 1) for line in printed.split("\0") if line)
            self._variables |= of_image | task.variables("environment")
        except BaseException:
            self.close()
            raise

    def command(self, seconds: float, variables: Mapping[str, str]) -> list[str]:
        variables = self._variables | variables
        limits = f"--as={self._memory} --nproc=256 --cpu={seconds + 1:.0f} --core=0"
        without_rights = "setpriv --no-new-privs --bounding-set=-all --inh-caps=-all"
        inside = f"--mount --pid --net --ipc --uts {without_rights} prlimit {limits} env -i"
        folder = f"--chdir={variables.get('PWD', '/')}"
        return [*self._enter, *split(inside), folder, *_assigned("", variables), "bash", "-c"]

    def close(self) -> None:
        os.kill(self._first, signal.SIGKILL)  # all other processes of the sandbox end with it
        self._holder.communicate()


def _bubblewrap(storage_mb: int) -> list[str]:
    """Returns a command that holds a sandbox open until its input is closed, if only by the end of this process."""
    links = " ".join(f"--symlink usr/{name} /{name}" for name in ("bin", "sbin", "lib", "lib64"))
    shown = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime", "/etc/ssl/certs")
    binds = " ".join(f"--ro-bind-try {path} {path}" for path in shown)
    users = "echo root:x:0:0:root:/root:/bin/bash > /etc/passwd; echo root:x:0: > /etc/group"
    begin = f"{_LOGS} /root; mkdir -m 1777 /tmp; {users}; echo ready; cat > /dev/null"
    return split(
        f"bwrap --unshare-all --unshare-user --uid 0 --gid 0 --hostname sandbox --size {storage_mb * 2**20} --tmpfs / "
        f"--ro-bind /usr /usr {links} {binds} --proc /proc --dev /dev --size {2**24} --tmpfs /dev/shm "
        f"--remount-ro /dev sh -c {quote(begin)}"
    )


class Container(Sandbox):
    """A container of docker or podman. It ends after six hours if its run was killed."""

    def __init__(self, task: TaskFolder, config: SandboxConfig, engine: str) -> None:
        super().__init__(task, config)
        self._engine, workdir = engine, task.get("environment", "workdir")
        self._workdir = [f"--workdir={workdir}"] if workdir else []
        environment, image = task.folder / "environment", task.get("environment", "docker_image")
        if image is None:
            seconds = task.get("environment", "build_timeout_sec", 600.0)
            build = [engine, "build", "--quiet", str(environment)]
            image = _output(build, f"for which {engine} build failed", seconds)
        is_public = task.get("environment", "network_mode", "public") == "public"
        may_connect = is_public and task.get("environment", "allow_internet", True)
        network = "" if config.network and may_connect else "--network=none"
        memory = task.megabytes("memory", config.memory_mb)
        cpus = task.get("environment", "cpus", 1)
        limits = f"--memory={memory}m --memory-swap={memory}m --cpus={cpus} --pids-limit=256"
        run = split(f"{engine} run --detach --rm --init {limits} {network}")
        run += [*_assigned("--env=", task.variables("environment")), image, "sleep", "21600"]
        self._id = _output(run, f"for which {engine} run failed")
        try:
            make = [engine, "exec", self._id, *split(_LOGS), workdir or "/"]
            _output(make, "whose folders were not made")
            if environment.is_dir() and not (environment / "Dockerfile").exists():
                self.put(environment, ".")
        except BaseException:
            self.close()
            raise

    def command(self, seconds: float, variables: Mapping[str, str]) -> list[str]:
        options = [*self._workdir, *_assigned("--env=", variables)]
        return [self._engine, "exec", "--interactive", *options, self._id, "bash", "-c"]

    def close(self) -> None:
        _run([self._engine, "rm", "--force", self._id], OWN_SECONDS)


def _assigned(option: str, variables: Mapping[str, str]) -> list[str]:
    return [f"{option}{name}={value}" for name, value in variables.items()]


def _run(command: Sequence[str], seconds: float) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds, text=True, errors="replace"
    )  # fmt: skip


def _output(command: Sequence[str], failed: str, seconds: float = OWN_SECONDS) -> str:
    """Returns the last line that a command prints: docker's warnings are above it.

    Raises LeftOut, with what `failed`, if the command fails or takes longer than `seconds`.
    """
    try:
        done = _run(command, seconds)
    except subprocess.TimeoutExpired:
        raise LeftOut(f"{failed} (no end within {seconds:g} s)") from None
    if done.returncode:
        raise LeftOut(f"{failed} ({done.stdout.strip()[-200:]})")
    return done.stdout.strip().rpartition("\n")[2]


def read_reward(text: str) -> float:
    """Returns the reward in reward.txt or reward.json: a number; of several by name that of "reward", or the only one.

    Raises ValueError, TypeError or KeyError if there is none.
    """
    value = json.loads(text) if "{" in text else float(text)
    if isinstance(value, dict):
        value = value["reward"] if len(value) != 1 else next(iter(value.values()))
    if value is None:
        raise TypeError("the reward is null; expected a number")
    return checked_reward(value)


@functools.cache
def chosen_engine(asked: str) -> str:
    """Returns docker, podman or bubblewrap: the first that answers, of those that `asked` allows."""
    tests = {"docker": "docker ps", "podman": "podman ps", "bubblewrap": "bwrap --version"}
    for engine, test in tests.items():
        quiet = f"{test} > /dev/null 2>&1"
        if asked in ("auto", engine) and subprocess.call(quiet, shell=True) == 0:
            return engine
    expected, remedy = "docker or podman with its daemon, or bubblewrap", "apt install bubblewrap."
    raise UserError(f"task.sandbox.engine = {asked!r}: expected {expected}. {remedy}")


def open_sandbox(folder: Path, config: SandboxConfig) -> Sandbox:
    """Returns a new sandbox for the task in a folder. Raises LeftOut if it cannot be made."""
    task, engine = TaskFolder(folder), chosen_engine(config.engine)
    task.check(network=config.network and engine != "bubblewrap")
    return Bubblewrap(task, config) if engine == "bubblewrap" else Container(task, config, engine)
