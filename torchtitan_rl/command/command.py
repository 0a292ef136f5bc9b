"""torchtitan-rl COMMAND, from any folder. Each command has --help.

  train --config NAME                 trains; --list-configs shows the names
  preview --config NAME               the start answers 16 prompts; no training
  evaluate RUN or --config NAME       accuracy of a run, or of a config's start
  report RUN                          writes a run's report.html
  chat RUN                            you type, the run's model answers
  serve RUN                           the run's model at an OpenAI address
  export RUN --output FOLDER          writes a folder for transformers and vLLM
  models                              which models a run can start from

A config may be your own: --config path/to/file.py:function.

Environment variables of train, preview and evaluate:
  NGPU      processes on this node; default: its visible GPUs, or 1 without one
  NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT
            several nodes: the same command on each, with node 0's address
  LOG_RANK  the rank whose output is shown; default: 0. RUN/logs/ has all
"""

import gc
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Sequence

from torchtitan_rl.command import programs
from torchtitan_rl.errors import UserError, expect
from torchtitan_rl.observe.report.__main__ import main as report
from torchtitan_rl.run.node import check_build_tools, check_torch, environment_kind, gpu_count
from torchtitan_rl.run.rank_output import OutputStream, log_library_warnings
from torchtitan_rl.run.run_command import options_of_run
from torchtitan_rl.text import visible

QUESTIONS = {"-h", "--help", "--list-configs", "--print-config", "--dry-run", "--preview"}
"""Options of `train` that one process answers, without a launcher."""

PLANS = {"-h", "--help", "--print-config", "--dry-run"}
"""Those that may be about other GPUs than this machine's."""

_GPUS = re.compile(r"([1-9]\d*)x([1-9]\d*)")

LAUNCHER = "torchtitan_rl.run.launch"

TRAINING = {"train": [], "preview": ["--preview"], "evaluate": ["--eval-only"]}
"""The options of `train` that a command stands for."""

EVALUATE = """\
usage: torchtitan-rl evaluate RUN [--resume RUN/checkpoint/step-N] [--FIELD VALUE ...]
A run's newest checkpoint, or another, answers its held-out prompts; or a config's start:
"""

READERS = {
    "report": report,
    "chat": programs.chat,
    "serve": programs.serve,
    "export": programs.export,
    "models": programs.models,
}
"""What each other command calls with its arguments. It returns None or an exit code."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, 2 for wrong input, or the training's."""
    if arguments is None:  # the process is this command's
        sys.stdout = OutputStream(sys.stdout)
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    log_library_warnings()
    try:
        commands, remedy = [*TRAINING, *READERS], "See torchtitan-rl --help."
        expected = f"one of {', '.join(commands)}"
        expect(name in commands, "torchtitan-rl COMMAND", name, expected, remedy)
        if name in READERS:
            return READERS[name](rest) or 0
        os.environ.setdefault("TORCHTITAN_RL_PROGRAM", f"torchtitan-rl {name}")
        if name == "evaluate" and rest and not rest[0].startswith("-"):
            rest = [*options_of_run(rest[0], rest[1:]), *rest[1:]]
        if not {"-h", "--help"}.intersection(rest):
            rest += TRAINING[name]
        elif name == "evaluate":
            print(EVALUATE)
        module = training(rest)
        if module[0] != LAUNCHER:
            return os.execv(sys.executable, [sys.executable, "-m", *module])
        check_in_child(rest)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    from torchtitan_rl.run import launch

    processes = int(os.environ["WORLD_SIZE"])  # of all nodes
    started = "1 process" if processes == 1 else f"{processes} processes"
    print(f"start {started} ...", flush=True)  # their first line takes seconds
    return launch.main(module[1:])


def check_in_child(arguments: Sequence[str]) -> None:
    """Check a training's command line before any rank is started, in two seconds. If it is wrong, this process ends.

    A child of this process does it: it runs the user's code and changes the environment that the ranks start with.

    Raises UserError if torch cannot be imported.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends both without a traceback
    gc.disable()  # looking for garbage takes a sixth of the time of these imports
    check_torch()  # imports it, for both
    child = multiprocessing.get_context("fork").Process(target=_check, args=(arguments,))
    child.start()
    import torch.distributed.run  # noqa: F401  (the launcher's, while the child checks)

    child.join()
    if child.exitcode:
        os._exit(child.exitcode)  # an interpreter with torch takes 0.3 s to end
    gc.enable()


def _check(arguments: Sequence[str]) -> None:
    from torchtitan_rl.command.first_check import check_at_once
    from torchtitan_rl.command.registry import parse_args

    os.environ["RANK"] = "1"  # what is no error is printed by rank 0
    try:
        check_at_once(parse_args(arguments)[1])
    except UserError as error:
        print(visible(f"error: {error}"), file=sys.stderr)
        sys.exit(2)


def training(arguments: Sequence[str]) -> list[str]:
    """Returns the module and arguments that train, or that answer a question. Sets the variables that ranks read.

    Raises UserError if NODE_RANK or MASTER_ADDR is missing for several nodes, or a GPU run lacks a compiler.
    """
    environment, is_gpu = os.environ, environment_kind() == "gpu"
    if environment.get("NO_COLOR"):
        environment.setdefault("PYTHON_TYRO_ANSI_CODES", "False")  # tyro does not know NO_COLOR
    gpus = gpu_count() if is_gpu else 0
    processes = _count("NGPU", max(gpus, 1))
    options = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    environment["WORLD_SIZE"] = str(processes * _count("NNODES", 1))
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else the engine warns of NUMA
    if options & QUESTIONS:
        arguments = _plan_for_gpus(arguments)
        environment |= {"RANK": "0", "LOCAL_RANK": "0"}
        environment["LOG_RANK"] = "0"
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the launcher's ranks
        return ["torchtitan_rl.command.train", *arguments]
    rendezvous = _rendezvous()
    if is_gpu:
        check_build_tools()
    if gpus == 0:  # ranks on one CPU share its cores
        threads = max(len(os.sched_getaffinity(0)) // processes, 1)
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    for name, value in (("LOG_RANK", "0"), ("PYTHONUNBUFFERED", "1")):
        environment.setdefault(name, value)
    run = [f"--nproc_per_node={processes}", "-m", "torchtitan_rl.command.train", *arguments]
    return [LAUNCHER, *rendezvous, *run]


def _plan_for_gpus(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with the 8x80 after a question taken out, for which it sets ranks and memory: 8 GPUs of 80 GB."""
    rest = list(arguments)
    for place, word in enumerate(rest[:-1], start=1):
        place += rest[place] == "all"
        if word.replace("_", "-") in PLANS and (
            gpus := _GPUS.fullmatch("".join(rest[place : place + 1]))
        ):
            for variable in ("NGPU", "NNODES"):
                value, expected = os.environ.get(variable), f"nothing beside {word} {gpus[0]}"
                remedy = "It plans for the GPUs of all nodes: 16x80 is two of eight."
                expect(not value, variable, value, expected, remedy)
            os.environ["WORLD_SIZE"], os.environ["TORCHTITAN_RL_PLANNED_GIB"] = gpus.groups()
            del rest[place]
            break
    return rest


def _count(variable: str, default: int) -> int:
    """The number in an environment variable. Raises UserError if it is none above 0."""
    value = os.environ.get(variable) or str(default)
    is_count = value.isdecimal() and int(value) > 0
    expect(is_count, variable, value, "a number, 1 or more", "Leave it out for the default.")
    return int(value)


def _rendezvous() -> list[str]:
    """The launcher's options for this node. Without the checks several nodes would wait for each other, each as the first."""
    nodes = _count("NNODES", 1)
    node, address = os.environ.get("NODE_RANK", ""), os.environ.get("MASTER_ADDR", "")
    if nodes == 1:
        remedy = "Set NNODES on every node, or leave both out."
        expect(node in ("", "0"), "NODE_RANK", node, "0, as NNODES is 1", remedy)
        return ["--standalone"]
    expected = f"a number from 0 to {nodes - 1}, as NNODES = {nodes}"
    is_node = node.isdecimal() and int(node) < nodes
    expect(is_node, "NODE_RANK", node, expected, "Set it on every node.")
    expected = f"the host name or address of node 0, as NNODES = {nodes}"
    expect(bool(address), "MASTER_ADDR", address, expected, "Set it on every node.")
    port = os.environ.get("MASTER_PORT") or "29500"
    return [
        f"--nnodes={nodes}",
        f"--node_rank={node}",
        f"--master_addr={address}",
        f"--master_port={port}",
    ]


if __name__ == "__main__":
    sys.exit(main())
