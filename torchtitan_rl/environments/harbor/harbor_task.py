"""`Harbor`: a folder of tasks in Harbor's form."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from socket import gethostname
from typing import Literal

import torch.distributed as dist

from torchtitan_rl.comm import all_gather_lists
from torchtitan_rl.data.rows import Rows
from torchtitan_rl.data.table import Table, table_of
from torchtitan_rl.data.task import Example, Faults, RewardFunction
from torchtitan_rl.data.tool_schemas import Tool
from torchtitan_rl.data.turns import Environment, environment_reward
from torchtitan_rl.environments.harbor.sandbox import SandboxConfig, chosen_engine, open_sandbox
from torchtitan_rl.environments.harbor.shell import SandboxAgent, Shell, bash_tool
from torchtitan_rl.environments.harbor.task_folder import LeftOut, read_instruction
from torchtitan_rl.errors import expect
from torchtitan_rl.events import progress
from torchtitan_rl.fields.references import from_caller
from torchtitan_rl.types import Prompt

_REQUESTS = {
    "user": "Answer with a shell command in a ```bash block. You then read what it prints. When all is done, write no block.",
    "tool": "Use the tool bash. When all is done, answer without a call.",
}


class Harbor(Rows):
    """Tasks to solve by shell commands, each attempt in a sandbox of its own, judged by the tasks' own tests."""

    identity_columns = ("folder",)

    @dataclass(kw_only=True, slots=True)
    class Config(Rows.Config):
        path: str = ""
        """A folder of tasks as Harbor 0.25 has them, each a folder with task.toml, instruction.md, environment and tests."""

        sandbox: SandboxConfig = field(default_factory=SandboxConfig)

        role: Literal["user", "tool"] = "user"
        """Whose messages show what commands print. user: those of the ```bash blocks in the policy's message. tool: those of
        its calls of the tool bash, for models that were trained to call tools."""

        agent: list[str] = field(default_factory=list)
        """The command of an agent (docs/agents.md) that plays instead of the shell. Empty: the shell."""

    def table(self, path: str, *, split: str, field: str) -> Table:
        """Returns a row for each folder in `path`."""
        folder = Path(from_caller(path)).resolve()
        expect(bool(path) and folder.is_dir(), field, path, "a folder of tasks", "Correct it.")
        rows = {}
        for each in sorted(folder.glob("[!.]*/")):
            prompt = f"{read_instruction(each)}\n\n{_REQUESTS[self.config.role]}"
            rows[each.name] = {"prompt": prompt, "folder": str(each)}
        expect(bool(rows), field, path, "a folder of tasks, but it has no folders", "Correct it.")
        return table_of(folder.name, rows)

    def leave_out(self, faults: Faults) -> None:
        """Leaves out, and names, the tasks that Harbor could not read, or whose sandbox cannot be made on each node.

        The ranks of a node share the tasks out.
        """
        progress(f"commands run in {chosen_engine(self.config.sandbox.engine)}")
        rank, hosts = 0, [gethostname()]
        if dist.is_initialized():
            rank, hosts = dist.get_rank(), all_gather_lists(hosts)
        peers = [other for other, host in enumerate(hosts) if host == hosts[rank]]

        def all_faults(examples: Sequence[Example]) -> list[str | None]:
            folders = [Path(example.columns["folder"]) for example in examples]
            mine = range(peers.index(rank), len(folders), len(peers))
            found = [(n, fault) for n in mine if (fault := self._fault(folders[n]))]
            unusable = dict(all_gather_lists(found) if dist.is_initialized() else found)
            return [fault or unusable.get(n) for n, fault in enumerate(faults(examples))]

        super().leave_out(all_faults)

    def rehearse(self) -> Iterator[str]:
        """Yields the rewards of each task's solution and of an empty attempt."""
        for part in (self._train, *self._held_out.values()):
            for example in chain.from_iterable(part.batches()):
                folder = Path(example.columns["folder"])
                solved, nothing = self._rehearsed(folder, "solution"), self._rehearsed(folder)
                odd = " (expected 1 and 0: its tests, or a limit, are not as here)"
                if (solved, nothing) == (1, 0):
                    odd = ""
                yield f"{folder.name}: reward {solved:g} for its solution, {nothing:g} for nothing{odd}"

    def reward_functions(self) -> Sequence[RewardFunction]:
        return (environment_reward,)

    def tools(self) -> Sequence[Tool]:
        return (bash_tool(str),) if self.config.role == "tool" else ()  # for its schema

    def environment(self, prompt: Prompt) -> Environment:
        folder, config = Path(prompt.columns["folder"]), self.config
        sandbox = open_sandbox(folder, config.sandbox)
        if not config.agent:
            return Shell(sandbox, config.role)
        return SandboxAgent(sandbox, config.role, config.agent, read_instruction(folder))

    def _fault(self, folder: Path) -> str | None:
        """Why a task cannot be used; None if it can."""
        try:
            open_sandbox(folder, self.config.sandbox).close()
        except LeftOut as error:
            return str(error)
        return None

    def _rehearsed(self, folder: Path, script: str = "") -> float:
        """The reward after a script of the task, or after nothing."""
        with closing(open_sandbox(folder, self.config.sandbox)) as sandbox:
            if script and (folder / "solution/solve.sh").exists():
                sandbox.run_script("solution")
            return sandbox.reward()
