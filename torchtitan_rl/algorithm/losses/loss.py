"""What every loss declares and answers, the losses of tokens, and a loss of your own from one function."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import make_dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from torchtitan_rl.algorithm.aggregation import Aggregation
from torchtitan_rl.algorithm.losses.loss_inputs import LossInputs
from torchtitan_rl.algorithm.unused import ObjectivePart
from torchtitan_rl.errors import UserError
from torchtitan_rl.fields.own_config import OwnConfig
from torchtitan_rl.types import Episode, Group, Metric

TEACHER_TOKEN = "teacher_token"
"""The token column of episodes with the teacher's most likely token, where it is known."""
REFERENCE_LOGPROBS = "reference_logprobs"
TEACHER_LOGPROBS = "teacher_logprobs"
"""The token column with log nu, which `Teacher` sets."""


class Source(Protocol):
    """A frozen model that scores the step's episodes before they get credit: `trainer.teachers.frozen_models.Reference`, or a
    teacher."""

    name: str
    """What its time is reported as."""

    def add_logprobs(self, groups: Sequence[Group[Episode]]) -> None:
        """Set its log-probabilities of every episode's tokens: `reference_logprobs`, or one of
        `Credit.token_columns`. Collective."""


class Loss(ObjectivePart, ABC):
    """The base of `algorithm.loss`. Most losses are a `TokenLoss`, and most of those are `__call__` alone.

    The fields say what the loss needs, the methods what it does in a step: `assign_credit` before the update, `terms` for
    each micro-batch, `group_metrics` and `after_update` after it.
    """

    learns_from: Literal["advantages", "rewards", "samples", "demonstrations"] = "advantages"
    """Advantages: those of `algorithm.advantage`. Rewards: `assign_credit` makes them credit. Samples: the engine's, also
    without a reward, and one for a prompt is enough. Demonstrations: the data's completions, one for each prompt. Then there
    are no log mu and no ratio: pi_old is pi, and trainer and sampler are not compared."""
    reads: tuple[str, ...] = ()
    """Columns that it reads beside the fields of `LossInputs`: those of `Credit.columns` and `Credit.token_columns`, set by
    `assign_credit`, "reference_logprobs", for which the frozen reference is loaded, and "teacher_logprobs"."""
    divergence_beta: float | None = None
    """The beta of the exact divergence from the teacher that the loss reads from `LossInputs.token_columns`, as
    `models.divergence.chunked_divergence` has it. None: it reads none."""
    whole_groups: bool = False
    """Whether all sequences of a group must be in one micro-batch."""
    zero_without_advantage: bool = False
    """Whether a token without an advantage has zero gradient, so that an episode of such tokens needs no backward pass. A
    subclass says it again: it may add a term that has one."""
    controller_inputs: tuple[str, ...] = ()
    """Keys of the step's merged metrics that `after_update` reads."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.zero_without_advantage = vars(cls).get("zero_without_advantage", False)

    @property
    def uses_rewards(self) -> bool:
        """Whether an episode without a reward is left out of the loss."""
        return self.learns_from in ("advantages", "rewards")

    @property
    def from_engine(self) -> bool:
        """Whether the engine has sampled the tokens."""
        return self.learns_from != "demonstrations"

    @property
    def needs_teacher(self) -> bool:
        """Whether it learns from a teacher."""
        return self.divergence_beta is not None or TEACHER_LOGPROBS in self.reads

    def assign_credit(self, groups: list[Group[Episode]]) -> None:
        """Add to the credit of the step's episodes, which have shaped rewards and, if it learns from them, advantages."""

    @abstractmethod
    def terms(self, inputs: LossInputs, aggregation: Aggregation) -> dict[str, Tensor]:
        """This micro-batch's share of the loss, as "policy", and those of its parts to report; 0-d each."""

    def group_metrics(self, groups: list[Group[Episode]]) -> dict[str, Metric]:
        """Metrics of the step's groups that are specific to this loss."""
        return {}

    def after_update(self, stats: dict[str, float]) -> dict[str, Metric]:
        """Update the controllers, given the merged values of `controller_inputs`."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The controllers' state; empty without controllers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class TokenLoss(Loss):
    """A loss for each token, to be minimised. A subclass writes `__call__`."""

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> Tensor:
        """[T] the loss of each token; values outside `inputs.mask` are ignored."""

    def terms(self, inputs: LossInputs, aggregation: Aggregation) -> dict[str, Tensor]:
        losses = self(inputs)  # [T]
        check_values("algorithm.loss", self, losses, inputs.mask.shape)
        return {"policy": aggregation(losses * inputs.correction, inputs)}


def token_loss(function: Callable[..., Tensor]) -> type[TokenLoss]:
    """Make a TokenLoss of a function that returns the loss of each token, [T].

    Its first parameter gets the `LossInputs`. The others, which have a type and a default (`number(...)` for one with
    limits), are the fields of the loss's Config.

    Example: `@token_loss` above `def scaled(inputs, size: float = 2.0)` allows `algorithm.loss = scaled.Config(size=3.0)`.
    """
    _, *parameters = inspect.signature(function, eval_str=True).parameters.values()
    fields = [(p.name, p.annotation, p.default) for p in parameters]
    names = {"__module__": function.__module__, "__qualname__": f"{function.__qualname__}.Config"}
    config = make_dataclass(
        "Config", fields, bases=(TokenLoss.Config,), namespace=names, kw_only=True, slots=True
    )

    def call(self: TokenLoss, inputs: LossInputs) -> Tensor:
        return function(inputs, **{p.name: getattr(self.config, p.name) for p in parameters})

    namespace = {"Config": config, "__call__": call, "__doc__": function.__doc__}
    # Where inspect looks for the source, by which runs are compared.
    namespace["__wrapped__"] = function
    names = {"__module__": function.__module__, "__qualname__": function.__qualname__}
    return type(function.__name__, (TokenLoss,), namespace | names)


def check_values(field: str, part: OwnConfig, values: Tensor, shape: torch.Size) -> None:
    """Raise UserError unless a part returned a number for each token, [T].

    PyTorch would broadcast another shape, and multiply by a mask, in silence.

    Args:
        field: the part's field. Example: "algorithm.loss"
    """
    if isinstance(values, Tensor) and values.shape == shape and values.is_floating_point():
        return
    returned = type(values).__name__
    if isinstance(values, Tensor):
        returned = f"a {values.dtype} tensor of shape {list(values.shape)}"
    raise UserError(
        f"{field}: {type(part).__qualname__} returned {returned}: expected floats of shape {list(shape)}, one for each token "
        "of the micro-batch. Leave sums and means to algorithm.aggregation."
    )
