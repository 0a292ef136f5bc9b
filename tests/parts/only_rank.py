"""A process group of one process, for parts that ask for theirs."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from torchtitan_rl.device import DEVICE_TYPE


@contextmanager
def only_rank() -> Iterator[None]:
    """Inside, this process is the only rank of its run. The group is gone afterwards, whatever went wrong."""
    launched = {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": "29500"}
    backend = "gloo" if DEVICE_TYPE == "cpu" else "cpu:gloo,cuda:nccl"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in launched.items():
            patch.setenv(name, value)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            if dist.is_initialized():  # an engine that was closed has ended it
                dist.destroy_process_group()
