"""Worker processes, in which a call can be ended whatever it does: native code, endless loops, fork bombs.

    pool = WorkerPool([slow, wild], size=4)
    future = pool.submit(1, argument, seconds=10)   # wild(argument), in a process that already has the function
    future.result()                                 # its result; TimeoutError if it took longer

Each worker has a supervisor: a process that runs no foreign code, starts the worker, ends a call at its time limit, and replaces a
worker that has ended. A supervisor is forked when its worker is first needed, by a process that was forked when the pool was made, so
functions need not be picklable. All end with this process, however it ends, and take all that the workers have started along.
"""

import contextlib
import ctypes
import gc
import os
import pickle
import queue
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

from torchtitan_rl.text import plain

_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
"""Options of prctl(2)."""
_KEY_BYTES = 16
"""A random number in front of each message and of its answer: a function may write into its worker's descriptors."""
_END = signal.SIGRTMIN
"""Ends a supervisor, also one that has not set its handler yet and has no worker."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a batch system may send to every process of a run, which goes on until its checkpoint is saved."""


class WorkerDied(RuntimeError):
    """A worker's process ended before its call did."""


class WorkerKilled(WorkerDied):
    """It was ended by SIGKILL or a stop signal: a person, a batch system or the kernel sends these, a function does not."""


class CallRaised(RuntimeError):
    """The function raised. The text is the exception's type and text."""


class WorkerPool:
    """Up to `size` calls at a time, each in a worker process. A call that takes too long is killed and its worker replaced."""

    def __init__(self, functions: Sequence[Callable], size: int) -> None:
        """Fork the nursery of the supervisors, with the `functions` as they are now. Arguments and results must be picklable.

        Call it from the main thread and early, because forking a process with threads is risky.
        """
        # The last one returned is the next: there are as many workers as calls at a time.
        self._idle: queue.LifoQueue[Connection] = queue.LifoQueue()
        sys.stdout.flush()  # a child would print what it inherits in the buffer again
        ours, theirs = zip(*(Pipe() for _ in range(size)), strict=True)
        self._pids = [_fork(partial(_fork_supervisors, theirs, functions), ours)]
        for line in theirs:
            line.close()
        for line in ours:
            self._idle.put(line)
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="worker")

    def submit(self, function: int, *args: Any, seconds: float = 0) -> "Future[Any]":
        """Call the function with index `function`. The future gets its result or its exception.

        After `seconds` of the call itself it gets a TimeoutError; 0 for no limit.
        """
        return self._threads.submit(self.call, function, *args, seconds=seconds)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        while self._pids:
            pid = self._pids.pop()
            os.kill(pid, _END)
            os.waitpid(pid, 0)

    def call(self, function: int, *args: Any, seconds: float = 0) -> Any:
        """Make the call, and return its result or raise its exception. A wait for a worker has the same time limit."""
        data = pickle.dumps((function, args))
        try:
            line = self._idle.get(timeout=seconds or None)
        except queue.Empty:
            raise TimeoutError(f"no worker was free within {seconds:g} s") from None
        try:
            line.send(seconds)
            line.send_bytes(data)
            answer = line.recv_bytes()
        except (EOFError, OSError) as error:
            raise WorkerKilled("its supervisor has ended") from error
        finally:
            self._idle.put(line)
        result, fault = pickle.loads(answer)
        if fault is not None:
            raise fault
        return result


def _fork(
    run: Callable[[], None], inherited: Sequence[Connection], ended_by: signal.Signals = _END
) -> int:
    """Fork a process that does `run` and ends, by that signal if this one ends first. Returns its process id.

    It never returns into this one's code, has a session of its own, and is not ended by `_STOP_SIGNALS`. No call in it may reach
    the `inherited` connections.
    """
    # The child must not destroy the garbage that it inherits: a process group's destructor waits for a thread that it does not have.
    gc.freeze()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            for line in inherited:
                line.close()
            os.setsid()  # Ctrl-C is for the training process
            signal.signal(_END, _exit)
            for number in _STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            _control(_SET_DEATH_SIGNAL, ended_by)
            if os.getppid() == parent:  # else it has ended before it could send the signal
                run()
        finally:
            os._exit(0)
    gc.unfreeze()
    return pid


def _fork_supervisors(lines: Sequence[Connection], functions: Sequence[Callable]) -> None:
    """Fork the supervisor of each line when the first call comes over it. They end with this process."""
    unused = list(lines)
    while unused:
        for line in wait(unused):
            unused.remove(line)
            _fork(_Supervisor(line, functions).serve, unused)
            line.close()
    signal.pause()


class _Supervisor:
    """One worker's supervisor, in the process that was forked for it. It has one thread."""

    def __init__(self, line: Connection, functions: Sequence[Callable]) -> None:
        self._line, self._functions = line, functions
        self._worker = 0
        self._worker_line: Connection | None = None

    def serve(self) -> None:
        signal.signal(signal.SIGALRM, _time_out)
        _control(_SET_CHILD_SUBREAPER, 1)  # orphans of the worker become children, to be killed too
        try:
            while True:
                seconds, data = self._line.recv(), self._line.recv_bytes()
                self._line.send_bytes(self._answer(data, seconds))
        finally:
            signal.signal(_END, signal.SIG_IGN)
            self._kill_worker()

    def _answer(self, data: bytes, seconds: float) -> bytes:
        """The pickled (result, fault) of a call, of which one is None.

        A call whose worker is killed from outside is made once more.
        """
        try:
            try:
                return self._ask(data, seconds)
            except WorkerKilled:
                return self._ask(data, seconds)
        except (TimeoutError, WorkerDied) as fault:
            return pickle.dumps((None, fault))

    def _ask(self, data: bytes, seconds: float) -> bytes:
        """The worker's answer. Raises TimeoutError or WorkerDied."""
        if self._worker_line is not None and self._worker_line.poll():
            self._kill_worker()  # it has ended since its last call
        if self._worker_line is None:
            self._worker_line, theirs = Pipe()
            inherited = (self._line, self._worker_line)
            self._worker = _fork(partial(self._work, theirs), inherited, signal.SIGKILL)
            theirs.close()
        key = os.urandom(_KEY_BYTES)
        try:
            try:
                # The alarm also ends the wait for the rest of half a message.
                signal.setitimer(signal.ITIMER_REAL, seconds)
                self._worker_line.send_bytes(key + data)
                answer = self._worker_line.recv_bytes()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except TimeoutError:
            self._kill_worker()
            raise TimeoutError(f"took longer than {seconds:g} s") from None
        except (EOFError, OSError):
            raise _death(self._kill_worker()) from None
        if answer[:_KEY_BYTES] != key:
            self._kill_worker()
            raise WorkerDied("the function wrote into its worker's descriptors")
        return answer[_KEY_BYTES:]

    def _work(self, line: Connection) -> None:
        """Run the worker: make one call after another and send the results."""
        for number in (_END, signal.SIGALRM, *_STOP_SIGNALS):
            signal.signal(number, signal.SIG_DFL)
        import torch

        torch.set_num_threads(1)  # the threads of the process that was forked do not exist here
        pid = os.getpid()
        while True:
            message = line.recv_bytes()
            try:
                function, args = pickle.loads(message[_KEY_BYTES:])
                answer = pickle.dumps((self._functions[function](*args), None))
            except BaseException as error:  # also SystemExit
                fault = CallRaised(f"{type(error).__name__}: {plain(error)}")
                answer = pickle.dumps((None, fault))
            if os.getpid() != pid:  # a fork of the call, which would also send a result
                text = "a function forked and returned in the child too: the child ends here"
                print(text, file=sys.stderr, flush=True)
                return
            # Nobody may read it, or the call has closed it.
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            line.send_bytes(message[:_KEY_BYTES] + answer)

    def _kill_worker(self) -> int:
        """Kill the worker and all that it has started. Returns its wait status."""
        worker_status = 0
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        while pids := children.read_text().split():
            for pid in map(int, pids):
                with contextlib.suppress(ProcessLookupError):  # it leads no group
                    os.killpg(pid, signal.SIGKILL)
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                if pid == self._worker:
                    worker_status = status
        self._worker_line = None
        return worker_status


def _death(status: int) -> WorkerDied:
    """The fault for a worker with this wait status."""
    if not os.WIFSIGNALED(status):
        return WorkerDied(f"its process ended with exit code {os.WEXITSTATUS(status)}")
    number = os.WTERMSIG(status)
    kind = WorkerKilled if number in (signal.SIGKILL, *_STOP_SIGNALS) else WorkerDied
    return kind(f"its process was killed by signal {number} ({signal.strsignal(number)})")


def _exit(*_: Any) -> NoReturn:
    raise SystemExit


def _time_out(*_: Any) -> NoReturn:
    raise TimeoutError


def _control(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
