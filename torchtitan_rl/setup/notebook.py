"""Training from Python, for example from a notebook: the run is a job of its own, and its output appears where it is called.

from torchtitan_rl.setup.notebook import load_config, train

config = load_config("debug")
config.num_steps = 20
folder = train("debug", config)
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_rl.core.errors import TrainingStopped, UserError, expect
from torchtitan_rl.setup.print_config import as_python
from torchtitan_rl.setup.registry import load_config

if TYPE_CHECKING:
    from torchtitan_rl.setup.run_config import RunConfig

__all__ = ["load_config", "train"]

_ENDS_WITH_CALLER = """
import os, sys
from torchtitan_rl.resilience.job_processes import die_with_parent
die_with_parent()
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Runs its arguments as a command that the kernel kills with its parent: a restarted notebook leaves no run on the GPUs."""


def train(name: str, config: "RunConfig | None" = None, *, processes: int | None = None) -> Path:
    """Train and return the run's folder. The processes of the run end with it, so the GPUs and their memory are free again.

    Interrupting the notebook stops the run after its step, with a checkpoint; a second interrupt stops it at once.

    Args:
        name: the config that `config` was made from: a registered name or path/to/file.py:function.
        config: the config with changes; None: the named one. Its classes and functions must be in files, not in cells.
        processes: processes on this node; None: as ./run_train.sh chooses.

    Raises:
        UserError: for wrong input; the run has printed what is wrong.
        TrainingStopped: if the run ended in any other way than by completing its steps, or by an interrupt after a checkpoint.
    """
    config = load_config(name) if config is None else config
    function = name.rpartition(":")[2]
    folder = Path(config.dump_folder or f"outputs/{function}-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    code = as_python(name, config)
    expect(
        "from __main__ import" not in code, "config", name, "classes and functions from files, as the run is another process",
        "Move those of the notebook into a file, for example with %%writefile.",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "config.py"
        file.write_text(code)
        command = [sys.executable, "-m", "torchtitan_rl.setup.command", "train"]
        arguments = ["--config", f"{file}:{function}", "--dump-folder", str(folder)]
        environment = {**os.environ, **({} if processes is None else {"NGPU": str(processes)})}
        exit_code = _run([*command, *arguments], environment)
    if exit_code == 2:
        raise UserError(f"the run of {name} ended with exit code 2: its output says what is wrong")
    if exit_code not in (0, 128 + signal.SIGINT):
        raise TrainingStopped(f"the run in {folder} ended with exit code {exit_code}: its output says why")
    return folder


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Run the command and print what it prints. Passes interrupts on. Returns its exit code. It ends with this process."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "backslashreplace"}
    command = [sys.executable, "-c", _ENDS_WITH_CALLER, *command]
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
        while True:
            try:
                for line in process.stdout:
                    print(line, end="", flush=True)
                return process.wait()
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)
