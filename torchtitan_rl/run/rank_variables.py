"""The environment variables of a rank, for a process that torchrun has not started."""

import os
import socket


def be_only_rank() -> None:
    """Make a process that torchrun has not started the only rank. Variables that are set stay as they are."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**variables, "MASTER_PORT": str(free_port)}.items():
        os.environ.setdefault(name, value)
