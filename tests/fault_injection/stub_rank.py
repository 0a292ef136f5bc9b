"""A rank that does what its first argument says: the real launcher, torchrun and processes, without a model. No torch here."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from torchtitan_rl.run import rank_status
from torchtitan_rl.run.job_processes import die_with_parent
from torchtitan_rl.run.rank_status import StatusFile, WatchdogLimits
from torchtitan_rl.run.stop_signal import StopSignal


def hang_here() -> None:
    time.sleep(1000)


def main() -> None:
    act, folder, rank = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
    die_with_parent()
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    rank_status.ENDING_LIMIT_S = 2.0
    status_file = StatusFile(rank)
    status_file.limits = WatchdogLimits(notice_seconds=1.0, limit_seconds=6.0)
    status_file.update(run_folder=str(folder), keeps_record=act == "evaluates")
    stop = StopSignal()
    stop.requested()
    last = rank == int(os.environ["WORLD_SIZE"]) - 1
    for step in range(1, 1000):
        status_file.moved(f"step {step}: grade")
        (folder / f"rank_{rank}_at_{step}").touch()
        if step == 3 and last and act in ("killed", "evaluates"):
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 3 and last and act == "exits":
            os._exit(3)
        if step == 3 and last and act == "hangs":
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
            hang_here()
        time.sleep(0.05)
        status_file.moved(f"step {step}: gather")
        if stop.number or (step == 3 and act == "lingers"):
            break
        while act != "run" and not last and not (folder / f"rank_1_at_{step + 1}").exists():
            time.sleep(0.05)  # as in a gather
    if stop.number:
        (folder / "checkpoint" / f"step-{step}").mkdir(parents=True, exist_ok=True)
    status_file.set_outcome(str(stop.number) if stop.number else "done")
    if act == "lingers":  # as in a close of the engine that never returns
        hang_here()


if __name__ == "__main__":
    main()
