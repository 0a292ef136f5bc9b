"""Which numbers of a policy are not finite, by name: the cause of what its loss shows."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import OptimizersContainer

from torchtitan_rl import comm


def fault_in(model: nn.Module, optimizer: OptimizersContainer | None = None) -> str | None:
    """What holds NaN or infinity, the cause before the effect: weights, else the optimizer's moments, else gradients.

    Collective. None where all are finite. Example: "the weights of layers.3.feed_forward.w2.weight (and 2 more)"
    """
    parameters = dict(model.named_parameters())
    kinds = {
        "the weights": parameters.items(),
        "the optimizer's moments": _moments(parameters, optimizer),
        "the gradients": ((name, p.grad) for name, p in parameters.items() if p.grad is not None),
    }
    for kind, named in kinds.items():
        if names := list(dict.fromkeys(comm.all_gather_lists(_not_finite(named)))):
            return f"{kind} of {names[0]}" + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
    return None


def _moments(parameters: dict[str, Tensor], optimizer: OptimizersContainer | None) -> Iterator[tuple[str, Tensor]]:
    for part in optimizer or ():
        for name, parameter in parameters.items():
            for moment in part.state.get(parameter, {}).values():
                if isinstance(moment, Tensor):
                    yield name, moment


def _not_finite(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Of this rank's shards."""
    return [name for name, tensor in named if not torch.isfinite(_local(tensor)).all()]


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
