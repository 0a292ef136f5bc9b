"""scripts/multinode_train.slurm with stand-ins for Slurm's commands on PATH."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "multinode_train.slurm"


@pytest.fixture
def slurm(tmp_path):
    """A checkout with the script, a setup.sh that answers $SETUP_CODE, and srun and scontrol that log to calls.txt."""
    for folder in ("bin", "checkout/scripts"):
        (tmp_path / folder).mkdir(parents=True)

    def program(path, text):
        file = tmp_path / path
        file.write_text("#!/usr/bin/env bash\n" + text)
        file.chmod(0o755)

    log = tmp_path / "calls.txt"
    program("checkout/scripts/setup.sh", f'echo "setup $TORCHTITAN_RL_KIND $*" >>{log}; exit ${{SETUP_CODE:-0}}')
    program("bin/scontrol", f'echo "scontrol $*" >>{log}; [[ $1 == show ]] && printf "nodeA\\nnodeB\\n"; exit 0')
    program(
        "bin/srun",
        f'echo "srun cpus=$SRUN_CPUS_PER_TASK master=$MASTER_ADDR:$MASTER_PORT nodes=$NNODES" >>{log}\n'
        f'printf "<%s>" "$@" >>{log}; echo >>{log}\n'
        f"trap 'echo stopped >>{log}; exit 75' USR1; trap 'exit 143' TERM\n"
        "for _ in $(seq ${RUN_TENTHS:-0}); do sleep 0.1; done; exit ${RUN_CODE:-0}\n",
    )
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path / "checkout"),
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "node[A-B]",
        "SLURM_CPUS_PER_TASK": "96",
        "SLURM_JOB_ID": "17",
    }

    def start(*args, **more):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(["bash", str(SCRIPT), *args], env=environment | more, **pipes)

    start.log = log
    return start


def hears(pid, signal_number):
    """Whether the process has set a trap for the signal."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1]
    return bool(int(caught, 16) >> (signal_number - 1) & 1)


def finish(process):
    output, errors = process.communicate(timeout=30)
    return process.returncode, output + errors


def test_every_node_gets_the_rendezvous_its_cores_and_the_arguments(slurm):
    assert finish(slurm("--config", "qwen3_8b", "--task.x", "a b"))[0] == 0
    calls = slurm.log.read_text()
    assert "srun cpus=96 master=nodeA:29500 nodes=2" in calls
    assert "<--config><qwen3_8b><--task.x><a b><--dump-folder><outputs/slurm-17>" in calls
    assert "NODE_RANK=$SLURM_PROCID" in calls
    assert "requeue" not in calls


@pytest.mark.parametrize(("signal_number", "again"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_the_time_limit_stops_the_run_and_queues_it_again_but_a_cancelled_job_stays_cancelled(
    slurm, signal_number, again
):
    process = slurm("--config", "debug", RUN_TENTHS="30")
    while process.poll() is None and not (slurm.log.exists() and "srun" in slurm.log.read_text()):
        time.sleep(0.05)
    while process.poll() is None and again and not hears(process.pid, signal_number):
        time.sleep(0.05)
    process.send_signal(signal_number)
    code, output = finish(process)
    calls = slurm.log.read_text()
    assert code != 0
    assert ("scontrol requeue 17" in calls) is again
    if again:
        assert "stopped" in calls
        assert code == 75
        assert "queued again" in output


def test_bash_reads_every_script():
    for script in [SCRIPT, ROOT / "run_train.sh", *sorted((ROOT / "scripts").glob("*.sh"))]:
        subprocess.run(["bash", "-n", str(script)], check=True)
