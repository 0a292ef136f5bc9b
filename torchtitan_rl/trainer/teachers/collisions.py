"""What `OptimalBaseline` needs of the policy before the update: each token's probability, and that two samples of it are equal."""

from collections.abc import Sequence

from torchtitan_rl.algorithm.losses.optimal_baseline import LOG_COLLISIONS, LOGPROBS
from torchtitan_rl.trainer.trainer import Trainer
from torchtitan_rl.types import Episode, Group, flat


class Collisions:
    """Scores a step's episodes by the policy itself, a `Source`.

    At half the temperature the policy is pi'(v) = pi(v)^2 / sum_u pi(u)^2, so log sum_u pi(u)^2 = 2 log pi(v) - log pi'(v) for any token v:
    two forwards, and nothing of [T, V].
    """

    name = "optimal_baseline"

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def add_logprobs(self, groups: Sequence[Group[Episode]]) -> None:
        """Set the two token columns of every episode, [L] each. Collective."""
        trainer = self.trainer
        plain = trainer.episode_logprobs(trainer.model, groups)  # [L] each
        sharp = trainer.episode_logprobs(
            trainer.model, groups, temperature=trainer.temperature / 2
        )  # [L] each
        for episode, of_plain, of_sharp in zip(flat(groups), plain, sharp, strict=True):
            episode.credit.token_columns |= {
                LOGPROBS: of_plain,
                LOG_COLLISIONS: 2 * of_plain - of_sharp,
            }
