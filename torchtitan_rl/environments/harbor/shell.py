"""Who plays a task in its sandbox: the policy by shell commands, or an agent. The task's tests give the reward."""

import math
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import replace

from torchtitan_rl.data.tool_calls import ToolCall
from torchtitan_rl.data.tool_schemas import Tool
from torchtitan_rl.data.turns import Message, Turn
from torchtitan_rl.environments.agents import AgentEnvironment
from torchtitan_rl.environments.harbor.sandbox import Sandbox
from torchtitan_rl.environments.tools import ToolEnvironment, in_process
from torchtitan_rl.types import FinishReason

_BLOCK = re.compile(r"```(?:bash|sh|shell)[^\S\n]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)


def bash_tool(run: Callable[[str], str]) -> Tool:

    @in_process  # the sandbox has the time limit
    def bash(command: str) -> str:
        """
        Runs a shell command and returns what it prints.

        Args:
            command: The command.
        """
        return run(command)

    return bash


def blocks(text: str, tools: Collection[str]) -> list[ToolCall]:
    """Returns the ```bash blocks of a message as one call of `bash`; nothing without a block."""
    found = _BLOCK.findall(text)
    return [ToolCall("bash", {"command": "".join(found)})] if found else []


class Shell(ToolEnvironment):
    """Runs the policy's commands in order. A message without one ends the attempt."""

    def __init__(self, sandbox: Sandbox, role: str) -> None:
        """`role`: "tool" for calls of the tool bash, "user" for ```bash blocks."""
        self.role, self._sandbox = role, sandbox
        parser = blocks if role == "user" else None
        super().__init__([bash_tool(sandbox.bash)], seconds=math.inf, parser=parser, side_by_side=1)

    def close(self, finish_reason: FinishReason) -> float | None:
        with closing(self._sandbox):
            return None if finish_reason == "env_error" else self._sandbox.reward()


class SandboxAgent(AgentEnvironment):
    """An agent that runs on this machine, and its commands in the sandbox.

    Its task is {"instruction": a text, "shell": a command, as a list, to which the agent appends a shell command}.
    """

    def __init__(self, sandbox: Sandbox, role: str, agent: Sequence[str], instruction: str) -> None:
        shell = sandbox.command(sandbox.config.command_seconds, {})
        super().__init__(agent, task={"instruction": instruction, "shell": shell}, role=role)
        self._sandbox = sandbox

    def step(self, message: Message) -> Turn:
        """The agent's turn, without a reward of its own: the tests give it."""
        return replace(super().step(message), reward=None)

    def close(self, finish_reason: FinishReason) -> float | None:
        with closing(self._sandbox):
            super().close(finish_reason)
            return None if finish_reason == "env_error" else self._sandbox.reward()
