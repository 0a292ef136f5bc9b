"""The command `torchtitan-rl`, which works from any folder.

torchtitan-rl train --config debug                          trains; train --help shows every option
torchtitan-rl train --config my_package.configs:mine        the same with a config of your own, also path/to/file.py:function
torchtitan-rl samples outputs/debug --best 3                shows a run's samples; samples --help shows the filters
torchtitan-rl report outputs/debug                          writes a run's report.html; report --help shows the options

Environment variables of `train`:
  NGPU      processes on this node (default: its visible GPUs, or 1 without one)
  NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT
            several nodes: the same command on each. MASTER_ADDR is node 0's host name or address
  LOG_RANK  the rank whose output is shown (default 0). The output of all ranks is in the run folder's logs/
"""

import os
import sys
from collections.abc import Sequence

from torchtitan_rl.core.errors import UserError, expect
from torchtitan_rl.setup.node import check_build_tools, environment_kind, gpu_count

READERS = {"samples": "torchtitan_rl.observability.samples", "report": "torchtitan_rl.report"}
"""Command: the module that is run for it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Become the program that the command names. Returns an exit code only where there is none: 0 for --help, 2 for an error."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    try:
        commands = ["train", *READERS]
        expect(
            name in commands,
            "torchtitan-rl COMMAND",
            name,
            f"one of {', '.join(commands)}",
            "See torchtitan-rl --help.",
        )
        module = launcher(rest) if name == "train" else [READERS[name], *rest]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return os.execv(sys.executable, [sys.executable, "-m", *module])


def launcher(arguments: Sequence[str]) -> list[str]:
    """The launcher's module and arguments for this node; sets what its ranks read from the environment.

    Raises:
        UserError: where several nodes are asked for without NODE_RANK or MASTER_ADDR, or a GPU run lacks a compiler.
    """
    environment = os.environ
    gpus = 0
    if environment_kind() == "gpu":
        check_build_tools()
        gpus = gpu_count()
    processes = environment.get("NGPU") or str(max(gpus, 1))
    if gpus == 0 and processes.isdecimal():  # ranks on one CPU share its cores
        environment.setdefault("OMP_NUM_THREADS", str(max(_cores() // max(int(processes), 1), 1)))
    defaults = {"LOG_RANK": "0", "PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    for name, value in {**defaults, "TORCHTITAN_RL_PROGRAM": "torchtitan-rl train"}.items():
        environment.setdefault(name, value)
    return [
        "torchtitan_rl.resilience.launch",
        *_rendezvous(environment.get("NNODES") or "1"),
        f"--nproc_per_node={processes}",
        *("-m", "torchtitan_rl.train", *arguments),
    ]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _rendezvous(nodes: str) -> list[str]:
    expect(
        nodes.isdecimal() and int(nodes) > 0, "NNODES", nodes, "a number of nodes, 1 or more", "Leave it out for one."
    )
    if int(nodes) == 1:
        return ["--standalone"]
    needed = {"NODE_RANK": "a number from 0 to NNODES - 1", "MASTER_ADDR": "the host name or address of node 0"}
    for name, expected in needed.items():
        given = os.environ.get(name, "")
        expect(bool(given), name, given, f"{expected}, as NNODES = {nodes}", "Set it on every node.")
    return [
        f"--nnodes={nodes}",
        f"--node_rank={os.environ['NODE_RANK']}",
        f"--master_addr={os.environ['MASTER_ADDR']}",
        f"--master_port={os.environ.get('MASTER_PORT') or '29500'}",
    ]


if __name__ == "__main__":
    sys.exit(main())
