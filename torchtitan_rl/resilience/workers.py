"""Calls in processes of their own, which really can be killed: native code, endless loops and fork bombs alike.

    pool = WorkerPool([slow, wild], size=4)
    future = pool.submit(1, argument, seconds=10)   # wild(argument), in a process that already has it
    future.result()                                 # what it returns; TimeoutError once it has been killed

A fork server stands between this process and its workers: a small process, forked before there are threads, that forks each
worker when it is asked for one. When this process ends, however it ends, the fork server kills every worker with all that the
worker has started, and ends.
"""

import contextlib
import ctypes
import io
import math
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from torchtitan_rl.resilience import processes
from torchtitan_rl.resilience.board import FORKED
from torchtitan_rl.resilience.death import OomDetector
from torchtitan_rl.resilience.printed import print_as

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
ANSWER = "answer"
"""What a worker sends besides "stdout" and "stderr": (name, content)."""


class WorkerDied(RuntimeError):
    """The process of a call ended before the call did."""


class WorkerPool:
    """Up to `size` processes at a time, each with one call; a call that takes too long is killed and its process replaced."""

    def __init__(self, functions: Sequence[Callable], size: int, *, whose: str | None = None) -> None:
        """Fork the server, which has `functions` as they are now: they need not be picklable, arguments and results must.

        Call it from the main thread, and early: the fewer threads there are, the less a fork can go wrong.

        Args:
            whose: what workers print counts as its output; None: as that of whatever the main thread is at.
        """
        self._fork_server = _ForkServer(functions)
        self._oom_detector = OomDetector()
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="worker", initializer=print_as, initargs=(whose,))
        self._mine = threading.local()

    def submit(self, function: int, *args: Any, seconds: float = 0) -> "Future[Any]":
        """Call one of the functions, by its place. The future has its result, or what it raised.

        Args:
            seconds: longest time of the call itself, after which it raises TimeoutError; 0 for no limit.
        """
        return self.submit_all([(function, seconds)], *args)[0]

    def submit_all(self, calls: Sequence[tuple[int, float]], *args: Any) -> "list[Future[Any]]":
        """Call several functions with the same arguments, one after another in one worker: (place, seconds) as for `submit`.

        The arguments are sent once. After a call that was killed, the rest goes on in a fresh worker.
        """
        futures = [Future() for _ in calls]
        self._threads.submit(self._run, deque(zip(calls, futures, strict=True)), args)
        return futures

    def close(self) -> None:
        """Kill what still runs, and the fork server."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._fork_server.close()

    def _run(self, calls: "deque[tuple[tuple[int, float], Future[Any]]]", args: tuple) -> None:
        """On one of the pool's threads, each of which has a worker of its own."""
        while calls:
            try:
                self._answer(calls, args)
            except Exception as error:
                calls.popleft()[1].set_exception(error)

    def _answer(self, calls: "deque[tuple[tuple[int, float], Future[Any]]]", args: tuple) -> None:
        """Set the results of the calls and take them off. Raises why the worker of the first that is left was ended."""
        data = pickle.dumps(([function for (function, _), _ in calls], args))
        pid, connection = getattr(self._mine, "worker", None) or self._fork_server.start()
        self._mine.worker = None  # until it has answered all
        try:
            connection.send_bytes(data)
            while calls:
                ok, value = _heard(connection, calls[0][0][1])
                _, future = calls.popleft()
                (future.set_result if ok else future.set_exception)(value)
        except TimeoutError:
            self._fork_server.kill(pid)
            raise
        except (EOFError, OSError) as error:
            how = _describe(self._fork_server.kill(pid))
            evidence = self._oom_detector.out_of_memory(pid)
            raise WorkerDied(f"its process was ended: {how}{evidence and f': {evidence}'}") from error
        self._mine.worker = pid, connection


def _heard(line: Connection, seconds: float) -> tuple[bool, Any]:
    """What a worker answers; what it prints until then is printed here. Raises TimeoutError after `seconds`; 0: never."""
    ends_at = time.monotonic() + (seconds or math.inf)
    while (left := ends_at - time.monotonic()) > 0 and line.poll(left if seconds else None):
        name, content = line.recv()
        if name == ANSWER:
            return content
        with contextlib.suppress(OSError, ValueError):  # a full disk, a stream that cannot show these characters
            getattr(sys, name).write(content)
    raise TimeoutError(f"took longer than {seconds:g} s")


class _ForkServer:
    """This process's side of the fork server."""

    def __init__(self, functions: Sequence[Callable]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._pid = os.fork()
        if self._pid == 0:
            _run_and_exit(_run_fork_server, theirs, functions)
        theirs.close()

    def start(self) -> tuple[int, Connection]:
        """A new worker: its process id and the line to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            pid = int(self._ask(b"start", [theirs.fileno()]))
        return pid, Connection(ours.detach())

    def kill(self, pid: int) -> int:
        """End a worker and all that it has started; how it ended, as `os.waitpid` says it."""
        return int(self._ask(b"kill %d" % pid))

    def close(self) -> None:
        """End all of them."""
        self._socket.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _ask(self, message: bytes, descriptors: Sequence[int] = ()) -> bytes:
        with self._lock:
            socket.send_fds(self._socket, [message], descriptors)
            if not (answer := self._socket.recv(64)):
                raise WorkerDied("the process that starts the workers has ended")
            return answer


def _run_and_exit(function: Callable, *args: Any) -> NoReturn:
    """The whole life of a forked process: nothing of its parent's stack may run in it."""
    try:
        function(*args)
    finally:
        os._exit(0)


def _run_fork_server(line: socket.socket, functions: Sequence[Callable]) -> None:
    """Start and kill workers as asked, until the other side is gone."""
    os.setsid()  # Ctrl-C is for the training process
    signal.signal(signal.SIGTERM, lambda *_: line.shutdown(socket.SHUT_RD))  # the end of the line ends the loop
    _control(_PR_SET_PDEATHSIG, signal.SIGTERM)  # should another child hold the line open
    _control(_PR_SET_CHILD_SUBREAPER, 1)  # what a worker's child leaves behind is the fork server's child, and found
    _close_sockets(but=line.fileno())
    workers: set[int] = set()
    try:
        while True:
            message, descriptors, _, _ = socket.recv_fds(line, 64, 1)
            if not message:
                break
            command, _, pid = message.partition(b" ")
            if command == b"start":
                started = os.fork()
                if started == 0:
                    line.close()
                    _run_and_exit(_serve, Connection(descriptors[0]), functions)
                os.close(descriptors[0])
                workers.add(started)
                line.send(b"%d" % started)
            else:
                workers.discard(int(pid))
                line.send(b"%d" % _end(int(pid), workers))
    finally:
        while workers:
            _end(workers.pop(), workers)


def _serve(line: Connection, functions: Sequence[Callable]) -> None:
    """A worker: answer one call after another."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    _control(_PR_SET_PDEATHSIG, signal.SIGKILL)
    import torch

    torch.set_num_threads(1)  # the parent's thread pool did not come along
    sending, pid = threading.Lock(), os.getpid()
    sys.stdout, sys.stderr = (_Sent(name, line, sending) for name in ("stdout", "stderr"))
    while True:
        try:
            places, args = line.recv()
        except EOFError:
            return
        for place in places:
            try:
                answer = (True, functions[place](*args))
            except BaseException as error:  # an exit, too, is an answer
                answer = (False, error)
            if os.getpid() != pid:  # else it would answer as well
                os.write(2, FORKED)
                os._exit(1)
            data = _pickled(answer)
            with sending:
                line.send_bytes(data)


class _Sent(io.TextIOBase):
    """A worker's stream: its text goes to the process that asked for the call, which bounds what all of them print together."""

    def __init__(self, name: str, line: Connection, sending: threading.Lock) -> None:
        self._name, self._line, self._sending = name, line, sending
        self._stream, self._pid = getattr(sys, name), os.getpid()

    def write(self, text: str) -> int:
        if os.getpid() != self._pid:  # a child that a call has forked: the line is not its own
            return self._stream.write(text)
        with self._sending:
            self._line.send((self._name, str(text)))
        return len(text)

    def fileno(self) -> int:
        return self._stream.fileno()


def _pickled(answer: tuple[bool, Any]) -> bytes:
    """The answer, or that it cannot be sent."""
    try:
        pickle.loads(data := pickle.dumps((ANSWER, answer)))
        return data
    except Exception as error:
        kind = type(answer[1]).__name__
        unsent = TypeError(f"{kind} {answer[1]!r:.200} cannot leave its process: {error}")
        return pickle.dumps((ANSWER, (False, unsent)))


def _end(pid: int, others: set[int]) -> int:
    """Kill a worker's process group, and then whatever else became the fork server's child without being a worker."""
    with contextlib.suppress(ProcessLookupError):  # it has just been forked, and is no group's leader yet
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    while strays := [child for child in processes.children(os.getpid()) if child not in others]:
        for stray in strays:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stray, signal.SIGKILL)
            os.waitpid(stray, 0)
    return status


def _close_sockets(*, but: int) -> None:
    """Let go of the sockets and GPUs of the process that this one is a copy of: its peers must see them close when it ends."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            target = os.readlink(entry)
            if int(entry.name) != but and target.startswith(("socket:", "/dev/nvidia")):
                os.close(int(entry.name))


def _control(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _describe(status: int) -> str:
    """A wait status in words. Example: _describe(9) == "killed by SIGKILL" """
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"it exited with code {os.WEXITSTATUS(status)}"
