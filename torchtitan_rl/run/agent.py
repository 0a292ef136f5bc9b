"""The process that runs torchrun for `torchtitan_rl.run.launch`, and writes which ranks failed to a file for it."""

import json
import logging
import os
import sys
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import main as torchrun
from torch.distributed.run import parse_args

from torchtitan_rl.run.job_processes import WATCH_VARIABLE, die_with_parent


def _no_meeting(error: Exception, nodes: str) -> str:
    """A message: why the nodes of a job did not find each other, and a remedy."""
    if "EADDRINUSE" in str(error):
        return f"another program, perhaps an older run, uses the port. Pass another MASTER_PORT, on every node: {error}"
    first = str(error).partition("\n")[0]
    return (
        f"the {nodes} nodes did not meet ({type(error).__name__}: {first}). Start the same command on every node, with the same "
        "NNODES, MASTER_ADDR and MASTER_PORT, and with another NODE_RANK on each."
    )


def main() -> None:
    """Run torchrun's command line. Exit with the code of the rank that failed first, 128 + N if signal N killed it."""
    die_with_parent()
    logger = logging.getLogger("torch.distributed.elastic")
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    logger.addHandler(logging.NullHandler())  # the launcher says which rank failed
    # Seconds from a forwarded SIGTERM to SIGKILL: long enough to end a step and save. torchrun's own default is 30.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "900")
    try:
        torchrun()
    except (DistError, RendezvousError) as error:
        print(f"error: {_no_meeting(error, parse_args(sys.argv[1:]).nnodes)}", file=sys.stderr)
        sys.exit(2)
    except ChildFailedError as error:
        with open(Path(os.environ[WATCH_VARIABLE], "failures.jsonl"), "w") as file:
            for failure in error.failures.values():
                file.write(json.dumps({"pid": failure.pid, "exitcode": failure.exitcode}) + "\n")
        code = error.get_first_failure()[1].exitcode
        sys.exit(code if code > 0 else 128 - code)
    except SignalException as error:  # the ranks got it too and have saved
        sys.exit(128 + error.sigval)


if __name__ == "__main__":
    main()
