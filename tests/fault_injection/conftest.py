"""Runs that nothing was done to, which others are compared with."""

import pytest

from tests.fault_injection.harness import train

STEPS = ["--num-steps", "6", "--checkpoint.interval", "1", "--checkpoint.keep-latest-k", "0"]


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory):
    """The folder of a run of 6 steps on one rank, with the checkpoint of every step."""
    return _run(tmp_path_factory, 1)


@pytest.fixture(scope="session")
def whole_run_2(tmp_path_factory):
    """The same on two ranks."""
    return _run(tmp_path_factory, 2)


def _run(tmp_path_factory, ranks):
    folder = tmp_path_factory.mktemp(f"whole{ranks}")
    ended = train(folder, *STEPS, ranks=ranks)
    assert ended.code == 0, ended.output
    return folder / "run"
