"""Which numbers of a policy are not finite, by name: the cause of what its loss shows."""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import OptimizersContainer

from torchtitan_rl.core import comm
from torchtitan_rl.core.errors import TrainingStopped
from torchtitan_rl.core.events import progress, record_metric


class NonFiniteLossError(TrainingStopped):
    """The loss, the gradient or a weight is NaN or infinite. Nothing of it is in a checkpoint."""


class FiniteUpdates:
    """Decides on updates whose numbers are not finite: left out and counted, or the end of training. All methods are collective."""

    def __init__(self, model: nn.Module, optimizer: OptimizersContainer, *, skip: int) -> None:
        """
        Args:
            skip: updates in a row that may be left out.
        """
        self._model, self._optimizer, self._skip = model, optimizer, skip
        self._in_a_row = 0

    def allows(self, loss: float, grad_norm: float) -> bool:
        """Whether the update may be applied; both are the same on every rank.

        Raises NonFiniteLossError, naming the cause, for one too many in a row, or where another batch would not help.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self._in_a_row = 0
            return True
        self._in_a_row += 1
        record_metric("optimizer/skipped_updates", 1, "max")
        fault = fault_in(self._model, self._optimizer) or "the loss alone"
        if fault.startswith("the gradients"):
            fault = "the gradients"  # clipping has spread it over all of them
        what = f"loss {loss}, gradient norm {grad_norm}: {fault} not finite; the update was not applied"
        if fault.startswith(("the weights", "the optimizer")):
            raise NonFiniteLossError(f"{what}. Go on from an earlier checkpoint, with a lower trainer.optimizer.lr.")
        if self._in_a_row > self._skip:
            raise NonFiniteLossError(
                f"{what}. It is number {self._in_a_row} in a row and trainer.skip_nonfinite_updates allows {self._skip}. Look at "
                "the step's rewards; where the loss had grown before, use a lower trainer.optimizer.lr."
            )
        progress(f"skipped an update, {self._in_a_row} of at most {self._skip} in a row: {what}")
        return False

    def check_weights(self, norm: float) -> None:
        """Raise NonFiniteLossError unless the weights that an update left, of this norm, are finite: before a checkpoint has them."""
        if not math.isfinite(norm):
            raise NonFiniteLossError(
                f"the update left {fault_in(self._model, self._optimizer)} not finite. The last checkpoint, where there is one, "
                "is good: resume from it with a lower trainer.optimizer.lr."
            )

    def check_loaded(self) -> None:
        """Raise NonFiniteLossError when what was loaded, of the start or of a checkpoint, is not finite."""
        if fault := fault_in(self._model, self._optimizer):
            raise NonFiniteLossError(
                f"{fault} not finite, as loaded. Use another checkpoint or another --hf-assets-path."
            )


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
