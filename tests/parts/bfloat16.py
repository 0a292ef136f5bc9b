"""Finds bfloat16 where a run did not ask for it."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NoBfloat16(TorchDispatchMode):
    """Inside, an operation that takes or returns a bfloat16 tensor fails."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            assert not isinstance(leaf, torch.Tensor) or leaf.dtype != torch.bfloat16, f"{func} in bfloat16"
        return result
