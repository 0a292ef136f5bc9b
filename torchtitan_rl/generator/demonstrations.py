"""Learning from demonstrations (SFT): the loss, and the groups that come from the data in place of the generator."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from torchtitan_rl.algorithm import Algorithm, LossInputs, NoCorrection, TokenLoss, Truncation
from torchtitan_rl.errors import UserError, expect
from torchtitan_rl.types import Completion, Group, Prompt

if TYPE_CHECKING:
    from torchtitan_rl.generator.generator import Generator

HELD_OUT_LOSS = "evaluation/loss"
"""The metric of demonstrations' held-out loss."""


class Nll(TokenLoss):
    """l_t = -log pi of the demonstrations' tokens: supervised fine-tuning. Rewards, if there are any, are only reported."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenLoss.Config):
        def check_objective(self, objective: Algorithm.Config) -> None:
            """Raise UserError for a setting that needs sampled completions or their rewards."""
            unused = {
                "kl.coef": (objective.kl.coef, 0.0),
                "mismatch": (type(objective.mismatch), NoCorrection.Config),
                "old_logprobs": (objective.old_logprobs, "policy"),
                "credit": (objective.credit, "episode"),
                "zero_variance": (objective.zero_variance, "keep"),
                "seed_grpo": (objective.seed_grpo, None),
                "truncation": (objective.truncation, Truncation.Config()),
            }
            for name, (value, only) in unused.items():
                expected = f"{only} with the loss Nll, which learns from demonstrations: nothing is sampled or compared"
                expect(value == only, f"algorithm.{name}", value, expected, "Leave it out.")

    uses_rewards = False
    uses_advantages = False
    from_engine = False
    uses_ratio = False

    def validate_group_size(self, n: int) -> None:
        expect(n == 1, "sampling.n", n, "1 with the loss Nll, as a row has one completion", "Use 1.")

    def __call__(self, inputs: LossInputs) -> Tensor:
        return -inputs.logprobs  # [T]


class Demonstrations:
    """The `services.GroupsInFlight` of demonstrations: a group is a prompt and the data's own completion."""

    needs_engine = False

    def num_new(self, needed: int) -> int:
        """Returns `needed`: each prompt is a whole group."""
        return needed

    def admit(self, new: Sequence[Prompt]) -> list[Prompt]:
        """Returns the new prompts; none are carried."""
        return list(new)

    def sample(
        self, generator: "Generator | NoEngine", prompts: Sequence[Prompt], *, needed: int, step: int, round: int
    ) -> Iterator[Group[Completion]]:
        """Yields this replica's share of the groups."""
        for prompt in prompts[generator.replica :: generator.num_replicas]:
            check_demonstrated(prompt)
            yield Group(prompt=prompt, samples=[replace(prompt.demonstration, policy_version=step - 1)])

    def gather(self, generator: "Generator | NoEngine") -> None:
        """Nothing is carried."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the position in the data is the prompts' own."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


class NoEngine:
    """Stands for the generator in a run that samples nothing: each rank takes its share of the demonstrations."""

    rank_in_replica = 0

    def __init__(self) -> None:
        self.replica, self.num_replicas = dist.get_rank(), dist.get_world_size()

    def sleep(self) -> None:
        """Nothing to free."""

    def close(self) -> None:
        """Nothing to stop."""


def check_demonstrated(prompt: Prompt) -> None:
    """Raise UserError for a prompt of a run that learns from demonstrations and that has none."""
    if prompt.demonstration is None:
        raise UserError(
            f"algorithm.loss learns from demonstrations: expected a demonstration of every prompt, but {prompt.text[-80:]!r} has none. Set "
            "task.demonstrations to last or all for rows, or prompts.demonstrate to a function that writes the completion."
        )
