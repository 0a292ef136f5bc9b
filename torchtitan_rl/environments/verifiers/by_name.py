"""`Verifiers`: an environment of verifiers by its name. Its rows, conversations and rewards come from a process of its own."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_rl.data.rows import row_order
from torchtitan_rl.data.task import Example, RewardFunction, Task
from torchtitan_rl.data.turns import environment_reward
from torchtitan_rl.environments.agents import AgentEnvironment
from torchtitan_rl.environments.agents.protocol import AgentFailed
from torchtitan_rl.errors import expect
from torchtitan_rl.events import WATCH_VARIABLE, heartbeat
from torchtitan_rl.fields.number import number
from torchtitan_rl.fields.references import from_caller

if TYPE_CHECKING:
    from torchtitan_rl.types import Prompt


class Verifiers(Task):
    """Rows and conversations of an environment. Every eighth row is held out, if none is by the environment."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        name: str = ""
        """A taskset of verifiers 0.4, or a package with `load_environment` of verifiers 0.1."""

        args: str = "{}"
        """Its arguments, a JSON object: the parameters of load_environment and `sampling`, the arguments of its requests; or the
        options of a taskset that verifiers' command line has after --env., such as {"taskset": {"pieces": 2}}."""

        python: str = ""
        """The Python in which it is installed, such as my_venv/bin/python. Empty: the run's own."""

        rows: int = number(1000, least=1)
        """Rows that are read of a taskset without end."""

    def __init__(self, config: Config) -> None:
        read = None
        with suppress(ValueError):
            read = json.loads(config.args)
        is_object = isinstance(read, dict)
        expect(is_object, "task.args", config.args, "a JSON object", "Correct it.")
        of_job = os.environ.get(WATCH_VARIABLE)  # else the process removes it at its end
        folder = Path(tempfile.mkdtemp(prefix="environment-", dir=of_job))
        self._socket, self._log = folder / "socket", folder / "log"
        arguments = json.dumps([str(self._socket), config.name, read, config.rows])
        python = from_caller(config.python) if "/" in config.python else config.python
        server = str(Path(__file__).with_name("server.py"))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python or sys.executable, "-P", server, arguments], start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        with heartbeat("load the environment"):
            rows = self._process.stdout.readline()
        there = "an environment that task.python loads with task.args"
        expect(bool(rows), "task.name", config.name, there, f"It printed: {self._tail()}")
        ours, theirs = json.loads(rows)
        expected = "an environment with rows to train on"
        expect(bool(ours), "task.name", config.name, expected, "It has none.")
        self._messages, numbers = ours + theirs, range(len(ours))
        self._held_out = range(len(ours), len(ours + theirs)) or numbers[7::8] or numbers[-1:]
        self._train = [row for row in numbers if row not in self._held_out] or numbers

    def train_example(self, index: int, *, seed: int) -> Example:
        """Returns the example at `index` of the stream. The order of the rows depends on the seed and the epoch."""
        epoch, place = divmod(index, len(self._train))
        return self._example(self._train[row_order(len(self._train), seed, epoch)[place]])

    def held_out_examples(self, num: int) -> list[Example]:
        """Returns the first `num` held-out rows, or all if there are fewer."""
        return [self._example(row) for row in self._held_out[:num]]

    def epoch(self, num_seen: int) -> float:
        return num_seen / len(self._train)

    def environment(self, prompt: "Prompt") -> AgentEnvironment:
        return AgentEnvironment(self._play, task=prompt.columns["row"])

    def reward_functions(self) -> Sequence[RewardFunction]:
        return (environment_reward,)

    def extract_answer(self, text: str) -> None:
        """Returns None: the reward alone judges."""

    def judge(self, answer: str | None, prompt: "Prompt") -> None:
        """Returns None: the reward alone judges."""

    def _example(self, row: int) -> Example:
        messages = self._messages[row] or [{"role": "user", "content": ""}]
        text = "\n\n".join(str(message["content"]) for message in messages)
        return Example(text=text, messages=messages, expected_answer="", columns={"row": row})

    async def _play(self, row: int, *, base_url: str, api_key: str) -> dict[str, Any]:
        """Returns the reward and the metrics of a conversation. Raises AgentFailed with the environment's error."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket)
            writer.write(json.dumps([row, base_url, api_key]).encode() + b"\n")
            outcome = json.loads(await reader.read())
            writer.close()
        except (OSError, ValueError) as error:
            raise AgentFailed(f"the environment's process has ended: {self._tail()}") from error
        if isinstance(outcome, str):
            raise AgentFailed(outcome)
        return outcome

    def _tail(self) -> str:
        """Returns the last 1,000 bytes that the process has printed."""
        return self._log.read_bytes()[-1000:].decode(errors="replace").strip()
