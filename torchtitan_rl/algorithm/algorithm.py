"""`Algorithm`: one objective, composed from small pieces, as the controller and the trainer call it."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor
from torchtitan.config import Configurable

from torchtitan_rl.types import Episode, Metric, Normalizers, Prompt, ScoredCompletion, TrainBatch

from .advantages import Advantage, Grpo
from .aggregations import Aggregation, TokenMean
from torchtitan_rl.run.errors import expect
from .credit import Credit, has_preference
from .episodes import count_normalizers, grouped
from .kl import KL
from .losses import Clip, PolicyLoss
from .metrics.episode_metrics import all_episode_metrics
from .mismatch import Mismatch, NoCorrection
from .objective import LossOutput, Objective
from .seed_grpo import SeedGrpo
from .truncation import Truncation


class Algorithm(Configurable):
    """The objective of a run: rewards to advantages, log-probabilities to a loss, merged statistics to controllers.

    Everything is a pure function of its arguments, except for controllers, whose state `state_dict` returns. Nothing
    here communicates: episodes are the same on every rank, and `loss` divides by counts of the whole update.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        advantage: Advantage.Config = field(default_factory=Grpo.Config)
        """How a group's rewards become advantages: GroupMean, Grpo, BatchStd or Rloo."""
        loss: PolicyLoss.Config = field(default_factory=Clip.Config)
        """The policy loss: Clip, Gspo, Cispo, Reinforce or MaxEnt."""
        aggregation: Aggregation.Config = field(default_factory=TokenMean.Config)
        """How token losses become one number: TokenMean, SeqMeanTokenMean or SeqSumConst."""
        mismatch: Mismatch.Config = field(default_factory=NoCorrection.Config)
        """Correction for sampler and trainer computing different log-probabilities."""
        kl: KL.Config = field(default_factory=KL.Config)
        """The term that holds the policy near a frozen reference; off by default."""
        entropy_coef: float = 0.0
        """Weight of the entropy bonus, token-weighted; 0 for none."""
        truncation: Truncation.Config = field(default_factory=Truncation.Config)
        """What to do with completions that hit the length limit."""
        zero_variance: Literal["keep", "drop", "refill"] = "keep"
        """Groups whose rewards are all equal: keep them in the normalisers with advantage 0, drop them before the
        forward, or replace them by groups of fresh prompts (what is still of zero variance after that is dropped)."""
        refill_rounds: int = 1
        """Most rounds of fresh prompts a step, with zero_variance "refill"."""
        seed_grpo: SeedGrpo.Config | None = None
        """Scale advantages down by the group's semantic entropy; None for off."""
        old_logprobs: Literal["policy", "sampler"] = "policy"
        """Denominator of the ratio: the trainer's own log-probabilities before the first update, or the sampler's."""
        nonfinite: Literal["raise", "mask"] = "raise"
        """NaN or infinite rewards, advantages and log-probabilities: an error that names the prompt, the sample and the
        function, or left out of the loss and counted."""

        def __post_init__(self) -> None:
            self.validate()

        def validate(self) -> None:
            """Raise ValueError naming the field, the value, what was expected and the remedy."""
            expect(
                math.isfinite(self.entropy_coef) and self.entropy_coef >= 0,
                "algorithm.entropy_coef", self.entropy_coef, "a number >= 0", "Use 0 for no bonus.",
            )  # fmt: skip
            expect(
                self.refill_rounds >= 1, "algorithm.refill_rounds", self.refill_rounds,
                "at least 1 round", 'Use zero_variance "drop" for none.',
            )  # fmt: skip
            expect(
                self.old_logprobs == "policy" or isinstance(self.mismatch, NoCorrection.Config),
                "algorithm.mismatch", self.mismatch, 'no correction with old_logprobs "sampler"',
                'The ratio is then already against the sampler; use old_logprobs "policy" to correct separately.',
            )  # fmt: skip
            self.loss.check_with(self)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.policy_loss = config.loss.build()
        self.kl = config.kl.build()
        self.seed_grpo = None if config.seed_grpo is None else config.seed_grpo.build()
        self._credit = Credit(
            advantage=config.advantage.build(),
            policy_loss=self.policy_loss,
            kl=self.kl,
            truncation=config.truncation.build(),
            seed_grpo=self.seed_grpo,
            keep_zero_variance=config.zero_variance == "keep",
            raise_nonfinite=config.nonfinite == "raise",
        )
        self._objective = Objective(
            policy_loss=self.policy_loss,
            aggregation=config.aggregation.build(),
            mismatch=config.mismatch.build(),
            kl=self.kl,
            entropy_coef=config.entropy_coef,
            old_is_sampler=config.old_logprobs == "sampler",
            raise_nonfinite=config.nonfinite == "raise",
        )

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen reference model must be loaded."""
        return self.config.kl.coef > 0 or self.policy_loss.needs_reference

    @property
    def needs_reference_for_episodes(self) -> bool:
        """Whether `make_episodes` itself reads the reference's log-probabilities, and not only the loss."""
        return self.kl.in_reward or self.policy_loss.needs_reference

    @property
    def requires_whole_groups(self) -> bool:
        """Whether the packer must keep a prompt's group in one micro-batch."""
        return self.policy_loss.requires_whole_groups

    @property
    def refill_rounds(self) -> int:
        """Rounds of fresh prompts a step may ask for, to replace groups that teach nothing."""
        return self.config.refill_rounds if self.config.zero_variance == "refill" else 0

    @property
    def controller_inputs(self) -> tuple[str, ...]:
        """Keys of the step's globally merged metrics that `after_update` reads; empty without controllers."""
        return self.policy_loss.controller_inputs

    def validate_group_size(self, n: int) -> None:
        """Raise ValueError for a number of samples a prompt that leaves nothing to compare."""
        expect(
            n >= 2, "sampling.n", n, "at least 2 completions a prompt, for the baseline is the group's own",
            "Use 4 or more; 8 and 16 are common.",
        )  # fmt: skip

    def usable_groups(self, groups: list[list[ScoredCompletion]]) -> list[bool]:
        """Whether each group's rewards differ, before any penalty: False is what `zero_variance` drops or refills."""
        return [has_preference(group) for group in groups]

    def make_episodes(
        self,
        prompts: list[Prompt],
        scored: list[ScoredCompletion],
        *,
        max_completion_tokens: int,
        reference_logprobs: list[list[float]] | None = None,
    ) -> list[Episode]:
        """The step's episodes with advantages, ordered by (prompt_idx, sample_idx) whatever the order of `scored`.

        Args:
            prompts: the step's prompts.
            scored: every completion of the step, of every rank, in any order.
            max_completion_tokens: the longest completion allowed.
            reference_logprobs: for each of `scored`, in its order, one number a token; needed where
                `needs_reference_for_episodes`, otherwise only kept on the episodes.

        Raises:
            ValueError: unknown prompts, duplicates, lists of different lengths, a missing reference.
            NonFiniteError: with nonfinite "raise", naming prompt, sample and function.
        """
        if self.needs_reference_for_episodes and reference_logprobs is None:
            raise ValueError(
                "reference_logprobs = None: expected one list for each completion, because algorithm.kl.placement is "
                '"reward" or the loss weighs by the reference. Compute them before make_episodes.'
            )
        return self._credit.assign(prompts, scored, reference_logprobs, max_completion_tokens)

    def normalizers(self, episodes: list[Episode], *, max_completion_tokens: int) -> Normalizers:
        """What the losses of one update over `episodes` divide by."""
        return count_normalizers(episodes, max_completion_tokens)

    def episode_metrics(self, episodes: list[Episode]) -> dict[str, Metric]:
        """Metrics of `make_episodes`' result; the same on every rank, so merging copies of them changes nothing."""
        groups = grouped(episodes)
        metrics = all_episode_metrics(episodes, groups, self.config.entropy_coef)
        metrics |= self.policy_loss.episode_metrics(groups)
        if self.seed_grpo is not None:
            metrics |= self.seed_grpo.metrics(groups)
        return metrics

    def loss(self, batch: TrainBatch, logprobs: Tensor, entropy: Tensor) -> LossOutput:
        """The loss of one packed micro-batch.

        Args:
            batch: T tokens, S sequences.
            logprobs: [T] log pi of `batch.labels`, with gradient; anything outside the loss mask.
            entropy: [T] H(pi) at each position, in nats, with gradient if `entropy_coef` > 0.

        Returns:
            The share of the step's loss, connected to `logprobs` even when no token takes part (then 0 with zero
            gradient, so that every rank runs its backward), and the micro-batch's metrics.

        Raises:
            NonFiniteError: with nonfinite "raise", naming prompt, sample and quantity.
            ValueError: a KL term without `batch.reference_logprobs`.
        """
        return self._objective(batch, logprobs, entropy)

    def after_update(self, stats: dict[str, float]) -> dict[str, Metric]:
        """Move the controllers; call once a step on every rank with the same merged values of `controller_inputs`."""
        return self.policy_loss.after_update(stats)

    def state_dict(self) -> dict[str, Any]:
        """Controllers' state, the same on every rank; part of the checkpoint."""
        return {"loss": self.policy_loss.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.policy_loss.load_state_dict(state["loss"])
