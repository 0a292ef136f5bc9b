"""Agents that run: a command in a process group and a folder of its own, or a coroutine of this process."""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_rl.environments.agents.protocol import AgentError, AgentFailed, Outcome
from torchtitan_rl.environments.checks import described
from torchtitan_rl.environments.threads import event_loop

if TYPE_CHECKING:
    from torchtitan_rl.environments.agents.gateway import Session

logger = logging.getLogger(__name__)

INHERITED = ("PATH", "USER", "LANG", "LC_ALL", "TMPDIR", "TZ")
"""Environment variables of the run that a command gets."""

KEPT = 2000
"""Last bytes of what a command has printed, for error messages."""

STOP_SECONDS = 10.0
"""Maximum time that a killed command is waited for."""


class RunningCommand:
    """A command in a new folder. All processes that it has started are killed when its first process ends, or by `stop`."""

    def __init__(
        self, command: Sequence[str], session: "Session", *, task: Any, env: Mapping[str, str]
    ) -> None:
        self._session = session
        self._folder = Path(tempfile.mkdtemp(prefix="agent-"))
        self._result, self._printed = self._folder / "result.json", self._folder / "printed.txt"
        task_file = self._folder / "task.json"
        own = {
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.key,
            "ANTHROPIC_BASE_URL": session.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": session.key,
            "AGENT_TASK": str(task_file),
            "AGENT_RESULT": str(self._result),
        }
        home = self._folder / "home"  # a cache in a shared one could answer in the policy's place
        home.mkdir()
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ} | {
            "HOME": str(home)
        }
        try:
            task_file.write_text(json.dumps(task))
            with self._printed.open("wb") as printed:
                self._process = subprocess.Popen(
                    command, cwd=self._folder, env={**inherited, **env, **own}, stdin=subprocess.DEVNULL,
                    stdout=printed, stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
        except BaseException:
            shutil.rmtree(self._folder)
            raise
        self._waiter = threading.Thread(target=self._wait, daemon=True)
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
            logger.warning(
                "the folder %s of an agent was not removed: %s", self._folder, described(error)
            )

    def _kill(self) -> None:
        if self._process.returncode is not None:  # the number of its group may be another's by now
            return
        with contextlib.suppress(ProcessLookupError):  # all of the group have ended
            os.killpg(self._process.pid, signal.SIGKILL)

    def _wait(self) -> None:
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self._kill()  # what it has started and left
        code = self._process.wait()
        try:
            self._session.end(self._outcome(code))
        except (AgentError, OSError) as error:
            self._session.end(error)

    def _outcome(self, code: int) -> Outcome:
        if code > 0:
            raise AgentFailed(f"the agent ended with exit code {code}: {self._last_printed()}")
        if code < 0:
            name = signal.strsignal(-code)
            raise AgentError(
                f"the agent was killed by signal {-code} ({name}): {self._last_printed()}"
            )
        return (
            Outcome.read(self._result.read_bytes())
            if self._result.exists()
            else self._session.outcome
        )

    def _last_printed(self) -> str:
        with self._printed.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - KEPT))
            return file.read().decode(errors="replace").strip()


class RunningCoroutine:
    """A coroutine on the event loop that all coroutines of environments share."""

    def __init__(
        self, agent: Callable[..., Awaitable[Any]], session: "Session", *, task: Any
    ) -> None:
        self._future = asyncio.run_coroutine_threadsafe(
            self._play(agent, session, task), event_loop()
        )

    def stop(self) -> None:
        """Cancels the coroutine."""
        self._future.cancel()

    async def _play(
        self, agent: Callable[..., Awaitable[Any]], session: "Session", task: Any
    ) -> None:
        try:
            value = await agent(task, base_url=session.base_url, api_key=session.key)
            session.end(session.outcome if value is None else Outcome.of(value))
        except AgentError as error:
            session.end(error)
        except (Exception, SystemExit) as error:
            session.end(AgentFailed(f"the agent raised {described(error)}"))
