"""The environment variables of a rank, for a process that torchrun has not started."""

import os
import socket

from torchtitan_rl.core.errors import expect

_LEAST = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 1, "LOCAL_WORLD_SIZE": 1}


def be_only_rank() -> None:
    """Make a process that torchrun has not started the only rank. Variables that are set stay as they are.

    Raises:
        UserError: if one is set to no number, or to one that is too small.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**variables, "MASTER_PORT": str(free_port)}.items():
        os.environ.setdefault(name, value)
    for name, least in _LEAST.items():
        given = os.environ.get(name, str(least))
        holds = given.isdecimal() and int(given) >= least
        expect(holds, name, given, f"a number from {least} up", "Unset it; torchrun and run_train.sh set it.")
