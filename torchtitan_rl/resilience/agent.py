"""The process that runs torchrun for `torchtitan_rl.resilience.launch`, and writes which ranks failed to a file for it."""

import importlib
import json
import logging
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import main as torchrun
from torch.distributed.run import parse_args

from torchtitan_rl.common.secret_variables import hide_from_proc
from torchtitan_rl.core.errors import UserError, expect
from torchtitan_rl.resilience.job_processes import WATCH_VARIABLE, die_with_parent

MOST_PER_CORE = 8
"""Ranks for each CPU core. Eight ranks on one core still start in minutes."""


CHECKED_PROGRAM = "torchtitan_rl.train"
"""A module with a function `check_arguments`, which returns an exit code: 2 after a message on stderr, for wrong arguments."""


class _Failures(logging.Handler):
    """Writes failed ranks to the file. torchrun has no hook for them, but logs each, with the numbers as the record's arguments."""

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("failed (exitcode"):
            exitcode, _, pid, *_ = record.args
            with open(failures_file(os.environ[WATCH_VARIABLE]), "a") as file:
                file.write(json.dumps({"pid": pid, "exitcode": exitcode}) + "\n")


def failures_file(folder: str | Path) -> Path:
    """The file with a line for each failed rank. Example: {"pid": 17, "exitcode": -9}; the code is negative for a signal."""
    return Path(folder) / "failures.jsonl"


def check_processes(given: str) -> None:
    """Raise UserError unless `given` is a number of ranks that torchrun accepts for a node."""
    counts = given in ("auto", "cpu", "gpu", "xpu") or (given.isdecimal() and int(given) > 0)
    remedy = "Leave NGPU out for one a GPU, or one without a GPU."
    expect(counts, "--nproc_per_node (NGPU)", given, "a number of processes, 1 or more", remedy)
    cores = len(os.sched_getaffinity(0))
    fits = not given.isdecimal() or int(given) <= MOST_PER_CORE * cores
    most = f"at most {MOST_PER_CORE} processes for each of this node's {cores} cores, as they would take hours to start"
    expect(fits, "--nproc_per_node (NGPU)", given, most, remedy)


def check_nodes(rank: int, nodes: str) -> None:
    """Raise UserError for a node rank with which torchrun would wait forever. `nodes` is "2", or "1:4"."""
    most = nodes.rpartition(":")[2]
    holds = not most.isdecimal() or rank < int(most)
    expect(holds, "--node_rank (NODE_RANK)", rank, f"a number from 0 to less than NNODES {most}", "Correct it.")


def check_arguments(args: Sequence[str]) -> None:
    """Have CHECKED_PROGRAM check its arguments while torchrun starts its ranks. If they are wrong, this process ends with code 2.

    A rank needs several seconds more until it knows. The check runs in a process of its own, because the user's config may do
    anything: only its verdict counts, the ranks find all else.
    """
    said = Path(os.environ[WATCH_VARIABLE]) / "wrong_arguments"
    child = os.fork()
    if child == 0:
        die_with_parent()
        with open(os.devnull, "w") as null, said.open("w") as file:
            os.dup2(null.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = 0
        try:
            code = importlib.import_module(CHECKED_PROGRAM).check_arguments(args)
            sys.stderr.flush()
        finally:
            os._exit(code)

    def wait() -> None:
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2:
            sys.stderr.write(said.read_text(errors="replace"))
            sys.stderr.flush()
            os._exit(2)

    threading.Thread(target=wait, daemon=True).start()


def _no_meeting(error: Exception, nodes: str) -> str:
    """A message: why the nodes of a job did not find each other, and a remedy."""
    if "EADDRINUSE" in str(error):
        return f"another program, perhaps an older run, uses the port. Pass another MASTER_PORT, on every node: {error}"
    first = str(error).partition("\n")[0]
    return (
        f"the {nodes} nodes did not meet ({type(error).__name__}: {first}). Start the same command on every node, with the same "
        "NNODES, MASTER_ADDR and MASTER_PORT, and with another NODE_RANK on each."
    )


def _refuse(message: str) -> int:
    """Print an error message. Returns the exit code of wrong input."""
    print(f"error: {message}", file=sys.stderr)
    return 2


def main() -> None:
    """Run torchrun's command line. Exit with the code of the rank that failed first, 128 + N if signal N killed it."""
    die_with_parent()
    hide_from_proc()
    logger = logging.getLogger("torch.distributed.elastic")
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    logger.addHandler(_Failures())
    # Seconds from a forwarded SIGTERM to SIGKILL: long enough to end a step and save. torchrun's own default is 30.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "900")
    try:
        given = parse_args(sys.argv[1:])
        check_processes(given.nproc_per_node)
        check_nodes(given.node_rank, given.nnodes)
        if given.module and given.training_script == CHECKED_PROGRAM:
            check_arguments(given.training_script_args)
        torchrun()
    except UserError as error:
        sys.exit(_refuse(str(error)))
    except (DistError, RendezvousError) as error:
        sys.exit(_refuse(_no_meeting(error, given.nnodes)))
    except ChildFailedError as error:
        with open(failures_file(os.environ[WATCH_VARIABLE]), "w") as file:
            for failure in error.failures.values():
                file.write(json.dumps({"pid": failure.pid, "exitcode": failure.exitcode}) + "\n")
        code = error.get_first_failure()[1].exitcode
        sys.exit(code if code > 0 else 128 - code)
    except SignalException as error:  # the ranks got it too and have saved
        sys.exit(128 + error.sigval)


if __name__ == "__main__":
    main()
