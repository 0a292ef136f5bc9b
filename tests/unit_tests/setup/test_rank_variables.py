"""A process that torchrun has not started is a rank too."""

import os

from torchtitan_rl.setup.rank_variables import be_only_rank

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def test_a_process_without_torchrun_becomes_the_only_rank(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    be_only_rank()
    assert [os.environ[name] for name in NAMES[:4]] == ["0", "0", "1", "127.0.0.1"]
    assert 0 < int(os.environ["MASTER_PORT"]) < 65536


def test_what_torchrun_has_set_stays(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "7")
    be_only_rank()
    assert {os.environ[name] for name in NAMES} == {"7"}
