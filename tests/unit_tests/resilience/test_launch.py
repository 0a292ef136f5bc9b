"""What a job is started with, whoever starts it."""

import os
import shutil
import subprocess
import sys

from torchtitan_rl.resilience import launch
from torchtitan_rl.resilience.launch import unknown_address


def test_closed_standard_streams_are_opened_for_all_that_is_started():
    code = "from torchtitan_rl.resilience.launch import open_streams; open_streams(); import subprocess, sys; "
    code += "sys.exit(subprocess.run([sys.executable, '-c', 'import os; [os.fstat(n) for n in range(3)]']).returncode)"
    closed = ["sh", "-c", f'{sys.executable} -c "$0" <&- >&- 2>&-', code]
    assert subprocess.run(closed).returncode == 0


def test_a_node_that_waits_says_that_it_does_not_know_node_0():
    said = unknown_address(["--nnodes=2", "--node_rank=1", "--master_addr=nosuch.invalid"])
    assert said.startswith(", and does not know the address 'nosuch.invalid' of node 0: ")
    assert unknown_address(["--nnodes=2", "--master_addr=127.0.0.1"]) == ""


def test_programs_of_the_environment_are_found_behind_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setattr(launch.sysconfig, "get_path", lambda _: str(tmp_path))
    (tmp_path / "own-ninja").touch(mode=0o755)
    launch.find_installed_programs()
    assert shutil.which("own-ninja") == str(tmp_path / "own-ninja")
    assert os.environ["PATH"] == f"/usr/bin:{tmp_path}"
