"""A rank that does what its first argument says: the real launcher, torchrun and processes, without a model. No torch here."""

import os
import subprocess
import sys
import time
from pathlib import Path

from torchtitan_rl.run.job_processes import die_with_parent
from torchtitan_rl.run.rank_status import StatusFile
from torchtitan_rl.run.stop_signal import StopSignal
from torchtitan_rl.run.watchdog import ENDING_LIMIT_S


def hang_here() -> None:
    time.sleep(1000)


def main() -> None:
    act, folder = sys.argv[1], Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    die_with_parent()
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    status_file = StatusFile(rank)
    status_file.update(run_folder=str(folder), notice_s=1.0, limit_s=6.0 if act in ("hang", "pause") else 100.0)
    stop = StopSignal(failure_marker=folder / "logs" / "failed")
    (folder / "logs" / "failed").unlink(missing_ok=True)
    bad = rank == int(os.environ["WORLD_SIZE"]) - 1
    if act == "full disk":
        status_file.moved("checkpoint/save" if rank else "start the vLLM engine")
        (folder / "begun").touch()
        time.sleep(2)
        print("stopped: the disk is full", file=sys.stderr, flush=True)
        os._exit(3)
    if act == "child":
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    for step in range(1, 1000):
        status_file.moved(f"step {step}: grade")
        (folder / f"rank_{rank}_at_{step}").touch()
        if step == 3 and bad and act == "exit":
            os._exit(0)
        if step == 3 and bad and act == "killed":
            time.sleep(0.5)  # until the launcher has looked
            os.kill(os.getpid(), 9)
        if step == 3 and bad and act in ("hang", "late"):
            hang_here()
        if step == 3 and bad and act == "pause":
            for _ in range(40):  # not one long sleep: that would be over at the end of the pause
                time.sleep(0.1)
        if step == 5 and bad and act == "pause":
            hang_here()
        time.sleep(0.05)
        status_file.moved(f"step {step}: gather")
        while bad is False and act in ("hang", "late", "exit") and step == 3 and not stop.number:
            time.sleep(0.05)
        if stop.number:
            break
        if step == 3 and bad and act == "early":
            time.sleep(12)
        if step == 3 and act in ("lingers", "early"):
            break
    status_file.update(outcome=str(stop.number) if stop.number else "done")
    if act == "lingers":  # as in a close of the engine that never returns, for ten minutes already
        while len(list(folder.glob("rank_*_at_3"))) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.05)
        status_file.update(since=time.monotonic() - ENDING_LIMIT_S)
        hang_here()


if __name__ == "__main__":
    main()
