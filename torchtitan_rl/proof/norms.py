"""What is measured of an optimizer step: the norms of the update and the weights, and whether all is finite."""

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer
from torchtitan.components.optimizer import OptimizersContainer

from torchtitan_rl.core import comm
from torchtitan_rl.core.device import DEVICE_TYPE, ON_CPU
from torchtitan_rl.core.errors import TrainingStopped
from torchtitan_rl.core.events import progress, record_metric
from torchtitan_rl.core.trainer.hf import local_shard

BLOCK = 2**20 if ON_CPU else 2**27
"""Elements that are measured at once. On a CPU their temporaries fit in the last-level cache; on a GPU they take 1 GiB."""


class StepNorms:
    """Measures the last step of any optimizer."""

    def __init__(self, optimizer: OptimizersContainer) -> None:
        """During a step there is a copy of the weights whose update cannot be computed from Adam's moments."""
        self._optimizer = optimizer
        self._before: dict[Tensor, Tensor] = {}
        self._squares: dict[Tensor, Tensor] = {}
        for one in optimizer:
            if not _is_adam(one):
                one.register_step_pre_hook(self._copy_weights)
                one.register_step_post_hook(self._measure_change)

    @torch.no_grad()
    def _copy_weights(self, optimizer: Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                self._before[p] = local_shard(p).clone()

    @torch.no_grad()
    def _measure_change(self, optimizer: Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                before = self._before.pop(p)  # frees one copy at a time
                self._squares[p] = _sum_of_squares(local_shard(p) - before)

    @torch.no_grad()
    def update_and_weight_norm(self) -> tuple[float, float]:
        """Returns (‖last update‖, ‖weights‖), the same on every rank. Collective.

        The update of Adam and AdamW is without weight decay, and recomputed from the moments, so that no copy of the
        weights is made. That of another optimizer is the whole change of the weights. It is 0 for a parameter that
        has not been updated. The second norm is NaN or infinite if any weight is.
        """
        update, weights = _zero(), _zero()  # 0-d each
        for optimizer in self._optimizer:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    share = _share_of_ranks(p)
                    weights += share * _sum_of_squares(local_shard(p))
                    update += share * self._square_of_update(optimizer, group, p)
        total = torch.stack([update, weights])  # [2]
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        update, weights = total.sqrt().tolist()
        return update, weights

    def _square_of_update(self, optimizer: Optimizer, group: dict, p: Tensor) -> Tensor:
        """Σ update² over this rank's shard of a parameter, 0-d."""
        if _is_adam(optimizer) and optimizer.state.get(p):
            return _square_of_adam(optimizer.state[p], group)
        return self._squares.get(p, _zero())


def _is_adam(optimizer: Optimizer) -> bool:
    """Whether `_square_of_adam` is this optimizer's update. A subclass may compute another one."""
    return type(optimizer) in (Adam, AdamW) and not any(group["amsgrad"] for group in optimizer.param_groups)


def _square_of_adam(state: dict[str, Tensor], group: dict) -> Tensor:
    """Σ (lr · m̂ / (√v̂ + eps))² over this rank's shard of a parameter, 0-d.

    Source: Loshchilov and Hutter, arXiv 1711.05101, algorithm 2.
    """
    step = state["step"].double()  # 0-d; stays on its device: no synchronization
    beta1, beta2 = group["betas"]
    scale = group["lr"] / (1 - beta1**step)
    bias = (1 - beta2**step).float().to(DEVICE_TYPE, non_blocking=True)
    total = _zero()
    for first, second in _blocks(local_shard(state["exp_avg"]), local_shard(state["exp_avg_sq"])):
        divisor = (second / bias).sqrt_().add_(group["eps"])
        total += _square(first / divisor)
    return total * scale.square()


def _sum_of_squares(tensor: Tensor) -> Tensor:
    """Σ x², 0-d."""
    total = _zero()
    for [block] in _blocks(tensor):
        total += _square(block)
    return total


def _square(block: Tensor) -> Tensor:
    """Σ x² in float64, 0-d. In float32 single values of 1e19 would overflow."""
    return torch.linalg.vector_norm(block, dtype=torch.float64).square()


def _zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=DEVICE_TYPE)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yields the blocks of at most BLOCK elements at the same place of tensors of the same size."""
    return zip(*[t.flatten().split(BLOCK) for t in tensors], strict=True)


def _share_of_ranks(t: Tensor) -> float:
    """1 / (number of ranks that hold the same values), so that a replicated parameter counts once in a sum over
    ranks."""
    shards = 1
    if isinstance(t, DTensor):  # is_shard() is False for the strided shards of FSDP over TP
        for dimension, placement in enumerate(t.placements):
            if not placement.is_replicate():
                shards *= t.device_mesh.size(dimension)
    return shards / dist.get_world_size()


class NonFiniteLossError(TrainingStopped):
    """The loss, the gradient or a weight is NaN or infinite. No checkpoint contains it."""


class FiniteUpdates:
    """Skips updates that are not finite, or stops training. All methods are collective."""

    def __init__(self, model: nn.Module, optimizer: OptimizersContainer, *, skip: int) -> None:
        """Allow `skip` skipped updates in a row."""
        self._model, self._optimizer, self._skip = model, optimizer, skip
        self._in_a_row = 0

    def allows(self, loss: float, grad_norm: float) -> bool:
        """Whether to apply the update. `loss` and `grad_norm` are the same on every rank.

        Raises NonFiniteLossError, with the cause, after too many skipped updates in a row, or if weights or moments
        are not finite, because another batch would not help.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self._in_a_row = 0
            return True
        self._in_a_row += 1
        # Rank 0 alone counts it, so that the sum over ranks is 1.
        record_metric("optimizer/skipped_updates", float(comm.is_rank_0()), "sum")
        fault = fault_in(self._model, self._optimizer) or "the loss alone"
        if fault.startswith("the gradients"):
            fault = "the gradients"  # all of them: clipping has spread it
        what = f"loss {loss}, gradient norm {grad_norm}: {fault} not finite; the update was not applied"
        if fault.startswith(("the weights", "the optimizer")):
            raise NonFiniteLossError(f"{what}. Go on from an earlier checkpoint, with a lower trainer.optimizer.lr.")
        if self._in_a_row > self._skip:
            raise NonFiniteLossError(
                f"{what}. It is number {self._in_a_row} in a row and "
                f"trainer.skip_nonfinite_updates allows {self._skip}. Look at the step's rewards; where the loss "
                "had grown before, use a lower trainer.optimizer.lr."
            )
        progress(f"skipped an update, {self._in_a_row} of at most {self._skip} in a row: {what}")
        return False

    def check_weights(self, norm: float) -> None:
        """Raise NonFiniteLossError if `norm`, of the updated weights, is not finite. Called before they are saved."""
        if not math.isfinite(norm):
            raise NonFiniteLossError(
                f"the update left {fault_in(self._model, self._optimizer)} not finite. The last "
                "checkpoint, where there is one, is good: resume from it with a lower trainer.optimizer.lr."
            )

    def check_loaded(self) -> None:
        """Raise NonFiniteLossError if loaded weights or moments are not finite."""
        fault = fault_in(self._model, self._optimizer)
        if fault:
            raise NonFiniteLossError(
                f"{fault} not finite, as loaded. Use another checkpoint or another --hf-assets-path."
            )


def fault_in(model: nn.Module, optimizer: OptimizersContainer | None = None) -> str | None:
    """Names tensors with NaN or infinity: weights first, then the optimizer's moments, then gradients. Collective.

    Returns None if all are finite. Example: "the weights of layers.3.feed_forward.w2.weight (and 2 more)"
    """
    parameters = dict(model.named_parameters())
    kinds = {
        "the weights": parameters.items(),
        "the optimizer's moments": _moments(parameters, optimizer),
        "the gradients": _gradients(parameters),
    }
    for kind, named in kinds.items():
        names = list(dict.fromkeys(comm.all_gather_lists(_not_finite(named))))
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            return f"{kind} of {names[0]}{more}"
    return None


def _moments(parameters: dict[str, Tensor], optimizer: OptimizersContainer | None) -> Iterator[tuple[str, Tensor]]:
    for part in optimizer or ():
        for name, parameter in parameters.items():
            for moment in part.state.get(parameter, {}).values():
                if isinstance(moment, Tensor):
                    yield name, moment


def _gradients(parameters: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            yield name, parameter.grad


def _not_finite(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Returns the names of this rank's shards with NaN or infinity."""
    names: list[str] = []
    for name, tensor in named:
        if not torch.isfinite(local_shard(tensor)).all():
            names.append(name)
    return names
