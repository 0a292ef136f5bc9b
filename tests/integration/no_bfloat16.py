"""A run that fails at its first operation in bfloat16: `torchrun -m tests.integration.no_bfloat16 --config debug ...`"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtitan_rl.command.train import main


class NoBfloat16(TorchDispatchMode):
    """Inside, an operation that takes or returns a bfloat16 tensor fails."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            assert not isinstance(leaf, torch.Tensor) or leaf.dtype != torch.bfloat16, f"{func} in bfloat16"
        return result


if __name__ == "__main__":
    with NoBfloat16():
        main()
