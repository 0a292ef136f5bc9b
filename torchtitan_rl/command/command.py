"""The command `torchtitan-rl`, which works from any folder.

torchtitan-rl train --config debug                          trains; train --help shows every option
torchtitan-rl train --config my_package.configs:mine        the same with a config of your own, also path/to/file.py:function
torchtitan-rl report outputs/debug                          writes a run's report.html; report --help shows the options
torchtitan-rl export --run outputs/debug --output FOLDER    writes a Hugging Face folder for transformers and vLLM

Environment variables of `train`:
  NGPU      processes on this node (default: its visible GPUs, or 1 without one)
  NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT
            several nodes: the same command on each. MASTER_ADDR is node 0's host name or address
  LOG_RANK  the rank whose output is shown (default 0). The output of all ranks is in the run folder's logs/
"""

import os
import re
import sys
from collections.abc import Sequence

from torchtitan_rl.errors import UserError, expect
from torchtitan_rl.run.node import check_build_tools, environment_kind, gpu_count

QUESTIONS = {"-h", "--help", "--list-configs", "--print-config", "--dry-run", "--preview"}
"""Options of `train` that one process answers, without a launcher."""

READERS = {
    "report": "torchtitan_rl.observe.report",
    "export": "torchtitan_rl.command.export",
}
"""The module to run, by command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Replace this process by the command's program. Returns only for --help, with 0, and for errors, with 2."""
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
        module = training(rest) if name == "train" else [READERS[name], *rest]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return os.execv(sys.executable, [sys.executable, "-m", *module])


def training(arguments: Sequence[str]) -> list[str]:
    """The module and arguments that train, or that answer a question. Raises UserError like `launcher`."""
    environment = os.environ
    environment.setdefault("TORCHTITAN_RL_PROGRAM", "torchtitan-rl train")
    if environment.get("NO_COLOR"):
        environment.setdefault("PYTHON_TYRO_ANSI_CODES", "False")  # tyro does not know NO_COLOR
    gpus = gpu_count() if environment_kind() == "gpu" else 0
    processes = environment.get("NGPU") or str(max(gpus, 1))
    ranks = _count("NGPU", processes)
    asked = QUESTIONS & {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    if not asked:
        return launcher(arguments, processes, gpus)
    nodes = _count("NNODES", environment.get("NNODES") or "1")
    if environment.get("NODE_RANK") and "--dry-run" in asked:
        _rendezvous(str(nodes))  # as the run's own start checks it
    environment |= {
        "WORLD_SIZE": str(ranks * nodes),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "LOG_RANK": "0",
    }
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the launcher's ranks
    return ["torchtitan_rl.train", *arguments]


def launcher(arguments: Sequence[str], processes: str, gpus: int) -> list[str]:
    """The launcher's module and arguments for this node. Sets the environment variables that ranks read.

    Args:
        processes: the number of this node's ranks.
        gpus: the number of its GPUs.

    Raises:
        UserError: if NODE_RANK or MASTER_ADDR is missing for several nodes, or a GPU run lacks a compiler.
    """
    environment = os.environ
    if environment_kind() == "gpu":
        check_build_tools()
    if gpus == 0 and processes.isdecimal():  # ranks on one CPU share its cores
        environment.setdefault(
            "OMP_NUM_THREADS", str(max(len(os.sched_getaffinity(0)) // max(int(processes), 1), 1))
        )
    for name, value in {
        "LOG_RANK": "0",
        "PYTHONUNBUFFERED": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }.items():
        environment.setdefault(name, value)
    rendezvous = _rendezvous(environment.get("NNODES") or "1")
    print(
        f"start {processes} rank{'s' * (processes != '1')} ...", flush=True
    )  # their first line takes seconds
    return [
        "torchtitan_rl.run.launch",
        *rendezvous,
        f"--nproc_per_node={processes}",
        *("-m", "torchtitan_rl.train", *arguments),
    ]


def _count(variable: str, given: str) -> int:
    """The number in an environment variable. Raises UserError if it is none above 0."""
    what = {"NGPU": "processes", "NNODES": "nodes"}[variable]
    expect(
        given.isdecimal() and int(given) > 0,
        variable,
        given,
        f"a number of {what}, 1 or more",
        "Leave it out for the default.",
    )
    return int(given)


def _rendezvous(nodes: str) -> list[str]:
    node = os.environ.get("NODE_RANK", "")
    if _count("NNODES", nodes) == 1:
        expect(
            node in ("", "0"),
            "NODE_RANK",
            node,
            "0, as NNODES is 1",
            "Set NNODES on every node, or leave both out.",
        )
        return ["--standalone"]
    of_nodes = node.isdecimal() and int(node) < int(nodes)
    expect(
        of_nodes,
        "NODE_RANK",
        node,
        f"a number from 0 to {int(nodes) - 1}, as NNODES = {nodes}",
        "Set it on every node.",
    )
    address = os.environ.get("MASTER_ADDR", "")
    is_address = bool(re.fullmatch(r"[\w.:%-]+", address))
    whose = f"the host name or address of node 0, as NNODES = {nodes}"
    expect(is_address, "MASTER_ADDR", address, whose, "Set it on every node.")
    port = os.environ.get("MASTER_PORT") or "29500"
    is_port = port.isdecimal() and 0 < int(port) < 65536
    expect(
        is_port, "MASTER_PORT", port, "the number of a port, 1 to 65535", "Leave it out for 29500."
    )
    return [
        f"--nnodes={nodes}",
        f"--node_rank={os.environ['NODE_RANK']}",
        f"--master_addr={os.environ['MASTER_ADDR']}",
        f"--master_port={port}",
    ]


if __name__ == "__main__":
    sys.exit(main())
