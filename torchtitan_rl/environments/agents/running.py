"""Agents that run: a command in a process group and a folder of its own, or a coroutine of this process."""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchtitan_rl.environments.agents.protocol import AgentError, AgentFailed, Outcome
from torchtitan_rl.environments.agents.same_path import HOME, TEMPORARY, WORK, new_folder, placed
from torchtitan_rl.environments.checks import described
from torchtitan_rl.environments.threads import event_loop

if TYPE_CHECKING:
    from torchtitan_rl.environments.agents.gateway import Session

logger = logging.getLogger(__name__)

Coroutine = Callable[..., Awaitable[Any]]
"""A coroutine function `agent(task, *, base_url, api_key)`."""

INHERITED = ("PATH", "USER", "LANG", "LC_ALL", "TZ")
"""Environment variables of the run that a command gets."""

KEPT = 2000
"""Last bytes of what a command has printed, for error messages."""

MOST_BYTES = 16 * 2**20
"""Limit of what a command prints and of its result: more would fill the rank's memory or disk."""

STOP_SECONDS = 10.0
"""Maximum time that a killed command is waited for."""


class RunningCommand:
    """A command in a new folder, see `same_path`. All processes that it has started are killed when its first process ends, or by `stop`."""

    def __init__(
        self,
        command: Sequence[str],
        session: "Session",
        *,
        task: Any,
        env: Mapping[str, str],
        same_path: bool = True,
    ) -> None:
        self._session = session
        self._folder = new_folder()
        self._result, self._printed = self._folder / "result.json", b""
        seen = self._folder
        if same_path:
            command, seen = placed(command, self._folder)
        own = {
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.key,
            "ANTHROPIC_BASE_URL": session.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": session.key,
            "AGENT_TASK": str(seen / "task.json"),
            "AGENT_RESULT": str(seen / self._result.name),
        }
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ} | {
            "HOME": str(seen / HOME),  # a cache in a shared one could answer in the policy's place
            "TMPDIR": str(seen / TEMPORARY),
        }
        try:
            (self._folder / "task.json").write_text(json.dumps(task))
            self._process = subprocess.Popen(
                command, cwd=self._folder / WORK, env={**inherited, **env, **own}, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except BaseException:
            shutil.rmtree(self._folder)
            raise
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        self._reader.start()
        self._waiter.start()

    def stop(self) -> None:
        """Kills the process group and removes the folder, as far as the agent has left it removable."""
        self._kill()
        self._waiter.join(STOP_SECONDS)
        try:
            shutil.rmtree(self._folder)
        except FileNotFoundError:  # the agent has removed it
            return
        except OSError as error:
            reason = described(error)
            logger.warning("the folder %s of an agent was not removed: %s", self._folder, reason)

    def _kill(self) -> None:
        if self._process.returncode is not None:  # the number of its group may be another's by now
            return
        with contextlib.suppress(ProcessLookupError):  # all of the group have ended
            os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self) -> None:
        size = 0
        with self._process.stdout as pipe:
            while size <= MOST_BYTES and (chunk := os.read(pipe.fileno(), 65536)):
                size += len(chunk)
                self._printed = (self._printed + chunk)[-KEPT:]
        if size > MOST_BYTES:
            self._session.end(AgentError(f"the agent printed more than {MOST_BYTES:,} bytes"))
            self._kill()

    def _wait(self) -> None:
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self._kill()  # what it has started and left
        code = self._process.wait()
        self._reader.join(STOP_SECONDS)
        try:
            self._session.end(self._outcome(code))
        except (AgentError, OSError) as error:
            self._session.end(error)

    def _outcome(self, code: int) -> Outcome:
        printed = self._printed.decode(errors="replace").strip()
        if code > 0:
            raise AgentFailed(f"the agent ended with exit code {code}: {printed}")
        if code < 0:
            name = signal.strsignal(-code)
            raise AgentError(f"the agent was killed by signal {-code} ({name}): {printed}")
        if not self._result.exists():
            return self._session.outcome
        with self._result.open("rb") as file:
            return Outcome.read(file.read(MOST_BYTES))


class RunningCoroutine:
    """A coroutine on the event loop that all coroutines of environments share."""

    def __init__(self, agent: Coroutine, session: "Session", *, task: Any) -> None:
        playing = self._play(agent, session, task)
        self._future = asyncio.run_coroutine_threadsafe(playing, event_loop())

    def stop(self) -> None:
        self._future.cancel()

    async def _play(self, agent: Coroutine, session: "Session", task: Any) -> None:
        try:
            value = await agent(task, base_url=session.base_url, api_key=session.key)
            session.end(session.outcome if value is None else Outcome.of(value))
        except AgentError as error:
            session.end(error)
        except (Exception, SystemExit) as error:
            session.end(AgentFailed(f"the agent raised {described(error)}"))
