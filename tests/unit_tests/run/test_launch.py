"""What a job is started with, whoever starts it."""

import os
import shutil
import sys

import pytest
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError
from torch.distributed.run import parse_args

from torchtitan_rl.run import agent, launch
from torchtitan_rl.run.launch import by_address


def test_programs_of_the_environment_are_found_behind_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setattr(launch.sysconfig, "get_path", lambda _: str(tmp_path))
    (tmp_path / "own-ninja").touch(mode=0o755)
    launch.find_installed_programs()
    assert shutil.which("own-ninja") == str(tmp_path / "own-ninja")
    assert os.environ["PATH"] == f"/usr/bin:{tmp_path}"


@pytest.mark.parametrize("error", [DistStoreError("timed out after 900 s"), RendezvousTimeoutError("no other node")])
def test_nodes_that_do_not_meet_are_told_in_a_sentence(monkeypatch, capsys, error):
    def torchrun():
        raise error

    monkeypatch.setattr(agent, "torchrun", torchrun)
    monkeypatch.setattr(agent, "die_with_parent", lambda: None)
    monkeypatch.setattr(sys, "argv", ["agent", "--nnodes=2", "--node_rank=1", "--nproc_per_node=1", "-m", "x"])
    with pytest.raises(SystemExit) as ended:
        agent.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: the 2 nodes did not meet (")
    assert said.endswith("another NODE_RANK on each.\n")


def test_ranks_of_one_node_meet_without_a_name():
    program = ["--nproc_per_node=2", "-m", "torchtitan_rl.train", "--standalone"]
    nodes = ["--nnodes=2", "--master_addr=node0", *program[:3]]
    assert by_address(nodes) == nodes
    found = by_address(["--standalone", *program])
    assert found[4:] == program
    assert not any("localhost" in arg for arg in found)
    parsed = parse_args(found)
    assert (parsed.rdzv_backend, parsed.rdzv_endpoint, parsed.local_addr) == ("c10d", "127.0.0.1:0", "127.0.0.1")
