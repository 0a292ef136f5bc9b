"""A pool of worker processes, whose calls can be killed whatever they do: native code, endless loops, fork bombs.

    pool = WorkerPool([slow, wild], size=4)
    future = pool.submit(1, argument, seconds=10)   # wild(argument), in a process that already has it
    future.result()                                 # what it returns; TimeoutError once it has been killed

A fork server forks the workers: a small process that is itself forked before this process has threads. When this process ends,
however that happens, the fork server kills all workers and the processes that they have started, and ends.
"""

import contextlib
import ctypes
import gc
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
from pathlib import Path
from typing import Any, NoReturn

from torchtitan_rl.errors import WorkerKilled
from torchtitan_rl.run import job_processes
from torchtitan_rl.run.out_of_memory import OomDetector
from torchtitan_rl.run.rank_status import FORKED
from torchtitan_rl.text import visible

_PR_SET_CHILD_SUBREAPER = 36
ANSWER = "answer"
"""The name in a worker's message (name, content) with a result. The other names are "stdout" and "stderr"."""


_KEY_BYTES, _LENGTH_BYTES = 16, 8
_LARGEST_BYTES = 2**30
"""The largest message of a worker."""


class WorkerDied(RuntimeError):
    """A worker's process ended before its call did, and nobody outside had killed it; or it can no longer be understood."""


class WorkerPool:
    """Up to `size` worker processes with one call each. A call that takes too long is killed and its worker replaced."""

    def __init__(self, functions: Sequence[Callable], size: int) -> None:
        """Fork the server, with the `functions` as they are now. Arguments and results must be picklable, the functions need not be.

        Call it from the main thread and early, because forking a process with threads is risky.
        """
        self._fork_server = _ForkServer(functions)
        self._oom_detector = OomDetector()
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="worker")
        self._mine = threading.local()

    def submit(self, function: int, *args: Any, seconds: float = 0) -> "Future[Any]":
        """Call the function with index `function`. The future gets its result or its exception.

        Args:
            seconds: time limit of the call itself, after which the future gets a TimeoutError; 0 for no limit.
        """
        return self.submit_all([(function, seconds)], *args)[0]

    def submit_all(self, calls: Sequence[tuple[int, float]], *args: Any) -> "list[Future[Any]]":
        """Call several functions, given as (index, seconds), with the same arguments, one after another in one worker.

        The arguments are sent once. After a call that was killed, a new worker runs the rest.
        """
        futures = [Future() for _ in calls]
        self._threads.submit(self._run, deque(zip(calls, futures, strict=True)), args)
        return futures

    def close(self) -> None:
        """Kill the workers and the fork server."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._fork_server.close()

    def _run(self, calls: "deque[tuple[tuple[int, float], Future[Any]]]", args: tuple) -> None:
        """Make the calls, on a thread of the pool. Each thread has its own worker."""
        while calls:
            try:
                self._answer(calls, args)
            except Exception as error:
                calls.popleft()[1].set_exception(error)

    def _answer(self, calls: "deque[tuple[tuple[int, float], Future[Any]]]", args: tuple) -> None:
        """Set the results of the calls and remove them. Raises if the worker of the first remaining call was killed or died."""
        data = pickle.dumps(([function for (function, _), _ in calls], args))
        pid, line = getattr(self._mine, "worker", None) or self._fork_server.start()
        self._mine.worker = None  # until it has returned all results
        try:
            seconds = calls[0][0][1]
            line.send(data, _end_of(seconds))
            while calls:
                seconds = calls[0][0][1]
                ok, value = _heard(line, _end_of(seconds))
                _, future = calls.popleft()
                (future.set_result if ok else future.set_exception)(value)
        except TimeoutError:
            self._fork_server.kill(pid)
            raise TimeoutError(f"took longer than {seconds:g} s") from None
        except (EOFError, OSError) as error:
            status = self._fork_server.kill(pid)
            evidence = self._oom_detector.out_of_memory()
            killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (
                signal.SIGKILL,
                signal.SIGTERM,
            )
            kind = WorkerKilled if killed else WorkerDied
            raise kind(
                f"its process was ended: {_describe(status)}{evidence and f': {evidence}'}"
            ) from error
        except Exception:  # it does not send what it should
            self._fork_server.kill(pid)
            raise
        self._mine.worker = pid, line


def _end_of(seconds: float) -> float:
    """The time at which a call must have ended that begins now; infinite for 0 seconds, which is no limit."""
    return time.monotonic() + (seconds or math.inf)


class _Line:
    """One end of the connection between the pool and a worker. Each message has the worker's key, its length and its bytes.

    A call inherits the descriptor and may write anything into it. What comes without the key is never unpickled, and half a message
    is waited for no longer than the call may take.
    """

    def __init__(self, end: socket.socket, key: bytes) -> None:
        self._socket, self._key = end, key

    def send(self, data: bytes, ends_at: float = math.inf) -> None:
        """Send a message. Raises TimeoutError at the time `ends_at`."""
        self._wait_until(ends_at)
        self._socket.sendall(self._key + len(data).to_bytes(_LENGTH_BYTES) + data)

    def receive(self, ends_at: float = math.inf) -> bytearray:
        """Wait for a message. Raises TimeoutError at the time `ends_at`, EOFError at the end, WorkerDied for foreign bytes."""
        header = self._read(_KEY_BYTES + _LENGTH_BYTES, ends_at)
        length = int.from_bytes(header[_KEY_BYTES:])
        if header[:_KEY_BYTES] != self._key:
            raise WorkerDied(
                "the function wrote into its worker's descriptors: expected the worker's own messages alone"
            )
        if length > _LARGEST_BYTES:
            raise WorkerDied(
                f"a message of {length:,} bytes: expected at most {_LARGEST_BYTES:,}. Print or return less."
            )
        return self._read(length, ends_at)

    def _read(self, length: int, ends_at: float) -> bytearray:
        data = bytearray(length)
        left = memoryview(data)
        while left:
            self._wait_until(ends_at)
            count = self._socket.recv_into(left)
            if count == 0:
                raise EOFError
            left = left[count:]
        return data

    def _wait_until(self, ends_at: float) -> None:
        """Set the time limit of the socket's next operation."""
        seconds = ends_at - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        self._socket.settimeout(None if seconds == math.inf else seconds)


def _heard(line: _Line, ends_at: float) -> tuple[bool, Any]:
    """Wait for a worker's result, and print what it prints. Raises TimeoutError at the time `ends_at`."""
    while True:
        name, content = pickle.loads(line.receive(ends_at))
        if name == ANSWER:
            return content
        with contextlib.suppress(
            OSError, ValueError
        ):  # a full disk, or a stream that cannot encode the characters
            getattr(sys, name).write(visible(content))


class _ForkServer:
    """Starts the fork server and sends it requests."""

    def __init__(self, functions: Sequence[Callable]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._pid = _fork()
        if self._pid == 0:
            _run_and_exit(_run_fork_server, theirs, functions)
        theirs.close()

    def start(self) -> tuple[int, _Line]:
        """Start a worker. Returns its process id and the connection to it."""
        ours, theirs = socket.socketpair()
        key = os.urandom(_KEY_BYTES)
        with theirs:
            pid = int(self._ask(b"start " + key, [theirs.fileno()]))
        return pid, _Line(ours, key)

    def kill(self, pid: int) -> int:
        """Kill a worker and the processes that it has started. Returns its wait status."""
        return int(self._ask(b"kill %d" % pid))

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it has ended already
            # A process that was forked since holds a copy of the socket: closing ours alone would not end the connection.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _ask(self, message: bytes, descriptors: Sequence[int] = ()) -> bytes:
        with self._lock:
            socket.send_fds(self._socket, [message], descriptors)
            if not (answer := self._socket.recv(64)):
                raise WorkerDied("the process that starts the workers has ended")
            return answer


def _fork() -> int:
    """Fork. The child never collects the garbage that it inherits.

    A destructor may wait for a thread that the child does not have, as that of a process group does.
    """
    collects = gc.isenabled()
    gc.disable()
    pid = os.fork()
    if pid == 0:
        gc.freeze()
    if collects:
        gc.enable()
    return pid


def _run_and_exit(function: Callable, *args: Any) -> NoReturn:
    """Run `function` in a forked process and end it, so that it never returns into its parent's code."""
    try:
        function(*args)
    finally:
        os._exit(0)


def _run_fork_server(line: socket.socket, functions: Sequence[Callable]) -> None:
    """Start and kill workers on request, until the pool's process is gone."""
    os.setsid()  # Ctrl-C is for the training process
    signal.signal(
        signal.SIGTERM, lambda *_: line.shutdown(socket.SHUT_RD)
    )  # closing the connection ends the loop
    _control(
        job_processes.PR_SET_PDEATHSIG, signal.SIGTERM
    )  # in case another child keeps the connection open
    _control(_PR_SET_CHILD_SUBREAPER, 1)  # adopts orphans of workers, so that it can kill them
    _close_sockets(but=line.fileno())
    workers: set[int] = set()
    try:
        while True:
            message, descriptors, _, _ = socket.recv_fds(line, 64, 1)
            if not message:
                break
            command, _, argument = message.partition(b" ")
            if command == b"start":
                started = _fork()
                if started == 0:
                    line.close()
                    _run_and_exit(
                        _serve, _Line(socket.socket(fileno=descriptors[0]), argument), functions
                    )
                os.close(descriptors[0])
                workers.add(started)
                line.send(b"%d" % started)
            else:
                workers.discard(int(argument))
                line.send(b"%d" % _end(int(argument), workers))
    finally:
        while workers:
            _end(workers.pop(), workers)


def _serve(line: _Line, functions: Sequence[Callable]) -> None:
    """Run a worker: make one call after another and send the results."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    _control(job_processes.PR_SET_PDEATHSIG, signal.SIGKILL)
    import torch

    torch.set_num_threads(1)  # the parent's thread pool does not exist here
    sending, pid = threading.Lock(), os.getpid()
    sys.stdout, sys.stderr = (_Sent(name, line, sending) for name in ("stdout", "stderr"))
    while True:
        try:
            places, args = pickle.loads(line.receive())
        except EOFError:
            return
        for place in places:
            try:
                answer = (True, functions[place](*args))
            except BaseException as error:  # also SystemExit
                answer = (False, error)
            if os.getpid() != pid:  # a fork of the call, which would also send a result
                os.write(2, FORKED)
                os._exit(1)
            data = _pickled(answer)
            with sending:
                line.send(data)


class _Sent(io.TextIOBase):
    """A worker's stream, which sends its text to the pool's process. That process hides secrets in it."""

    def __init__(self, name: str, line: _Line, sending: threading.Lock) -> None:
        self._name, self._line, self._sending = name, line, sending
        self._stream, self._pid = getattr(sys, name), os.getpid()

    def write(self, text: str) -> int:
        if os.getpid() != self._pid:  # a child that a call has forked must not use the connection
            return self._stream.write(text)
        with self._sending:
            self._line.send(pickle.dumps((self._name, str(text))))
        return len(text)

    def fileno(self) -> int:
        return self._stream.fileno()


def _pickled(answer: tuple[bool, Any]) -> bytes:
    """The pickled result, or an error if it cannot be pickled."""
    try:
        pickle.loads(data := pickle.dumps((ANSWER, answer)))
        return data
    except Exception as error:
        kind = type(answer[1]).__name__
        unsent = TypeError(f"{kind} {answer[1]!r:.200} cannot leave its process: {error}")
        return pickle.dumps((ANSWER, (False, unsent)))


def _end(pid: int, others: set[int]) -> int:
    """Kill a worker's process group, and then all other children of the fork server that are not workers."""
    with contextlib.suppress(
        ProcessLookupError
    ):  # it was just forked and does not lead a group yet
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    while strays := [child for child in job_processes.children(os.getpid()) if child not in others]:
        for stray in strays:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stray, signal.SIGKILL)
            os.waitpid(stray, 0)
    return status


def _close_sockets(*, but: int) -> None:
    """Close the inherited sockets and GPUs, so that they close for their peers when the parent process ends."""
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
        return f"killed by {job_processes.signal_name(os.WTERMSIG(status))}"
    return f"it exited with code {os.WEXITSTATUS(status)}"
