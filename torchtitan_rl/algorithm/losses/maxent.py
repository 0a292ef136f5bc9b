"""MaxEnt-GRPO's listwise loss."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from torchtitan_rl.types import Episode, Metric

from ..advantages import Grpo
from ..aggregations import Aggregation
from torchtitan_rl.run.errors import expect
from ..inputs import LossInputs
from ..maxent import BetaController, MetaController, TauController, is_neutral, listwise_weights, reward_distribution
from ..maxent.metrics import group_weight_metrics
from ..maxent.state import Controllers
from torchtitan_rl.metrics.summary import same_everywhere
from ..metrics.tally import Tally
from ..mismatch import NoCorrection
from .base import PolicyLoss
from .clip import Clip

if TYPE_CHECKING:
    from ..algorithm import Algorithm


class MaxEnt(PolicyLoss):
    """L = mean over groups of -sum_i w_i log softmax_i(s), s_i = log pi(y_i) the sequence log-probability.

    w is the group's target distribution (`maxent.weights`), fixed when the episodes are made. Optionally plus clip_coef
    times the clip loss with advantage w_i - 1/G. A group's sequences must lie in one micro-batch: the softmax spans
    them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PolicyLoss.Config):
        tau: float = 1.0
        """Temperature of the weights (its start, with a controller)."""
        beta: float = 0.0
        """Weight of the reference's log-probability in the weights (its start, with a controller); 0 loads none."""
        q_temperature: float = 1.0
        """T_q, temperature of the distribution over rewards, in units of reward."""
        q_floor: float = 1e-6
        """Least mass of a completion in that distribution."""
        normalize_reference: bool = True
        """Divide the reference's log-probability of a completion by its length."""
        normalize_policy: bool = False
        """Divide s_i by the completion's length."""
        neutral: Literal["skip", "uniform"] = "skip"
        """A group whose rewards are all equal: out of the loss, or pulled towards the uniform distribution over it."""
        clip_coef: float = 0.0
        """Weight of the additional clip loss."""
        clip: Clip.Config = field(default_factory=Clip.Config)
        """The additional clip loss."""
        tau_controller: TauController.Config | None = None
        """Holds the entropy of the weights at a target by moving tau."""
        beta_controller: BetaController.Config | None = None
        """Holds the divergence from the reference at a target by moving beta."""
        meta_controller: MetaController.Config | None = None
        """Moves both by analytic gradients, in place of the other two."""

        def __post_init__(self) -> None:
            name = "algorithm.loss"
            expect(0 < self.tau < math.inf, f"{name}.tau", self.tau, "a number > 0", "Use 1.")
            expect(0 <= self.beta < math.inf, f"{name}.beta", self.beta, "a number >= 0", "Use 0 for no reference.")
            expect(self.q_temperature >= 0, f"{name}.q_temperature", self.q_temperature, "a number >= 0", "Use 1.")
            expect(self.q_floor >= 0, f"{name}.q_floor", self.q_floor, "a number >= 0", "Use 1e-6.")
            expect(self.clip_coef >= 0, f"{name}.clip_coef", self.clip_coef, "a number >= 0", "Use 0 for no clip loss.")
            expect(
                self.beta_controller is None or self.beta > 0, f"{name}.beta", self.beta,
                "a number > 0 with a beta_controller", "It multiplies beta, which would stay 0; start at 0.01.",
            )  # fmt: skip

        def check_with(self, algorithm: "Algorithm.Config") -> None:
            expect(
                algorithm.kl.coef == 0, "algorithm.kl.coef", algorithm.kl.coef, "0 with the MaxEnt loss",
                "Its reference term is algorithm.loss.beta.",
            )  # fmt: skip
            expect(
                algorithm.seed_grpo is None, "algorithm.seed_grpo", algorithm.seed_grpo, "None with the MaxEnt loss",
                "It scales advantages, which MaxEnt replaces by its weights.",
            )  # fmt: skip
            expect(
                type(algorithm.advantage) is Grpo.Config, "algorithm.advantage", algorithm.advantage,
                "the default with the MaxEnt loss", "MaxEnt sets advantages itself, to w_i - 1/G; leave the field out.",
            )  # fmt: skip
            expect(
                self.clip_coef > 0 or isinstance(algorithm.mismatch, NoCorrection.Config),
                "algorithm.mismatch", algorithm.mismatch, "no correction with the MaxEnt loss",
                "A token weight has no place in a softmax over sequences; it needs the clip loss (clip_coef > 0).",
            )  # fmt: skip

    requires_whole_groups = True
    sets_advantages = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.clip = config.clip.build()
        self.controllers = Controllers(
            config.tau,
            config.beta,
            of_tau=config.tau_controller and config.tau_controller.build(),
            of_beta=config.beta_controller and config.beta_controller.build(),
            meta=config.meta_controller and config.meta_controller.build(),
        )
        self.controller_inputs = self.controllers.inputs
        self.needs_reference = config.beta > 0 or self.controllers.moves_beta

    def weigh(self, group: list[Episode]) -> None:
        """Weights of the group's completions that take part in the loss (they sum to 1); advantage w_i - 1/G."""
        members = [episode for episode in group if episode.in_loss]
        for episode in group:
            episode.weight, episode.advantage = 0.0, 0.0
        if not members:
            return
        q = self.target_of(members)
        beta = self.controllers.state.beta
        reference = [self._reference(episode) for episode in members] if beta > 0 else None
        weights = listwise_weights(q, reference, self.controllers.state.tau, beta)
        for episode, weight in zip(members, weights, strict=True):
            episode.weight = weight
            episode.advantage = weight - 1 / len(members)
            episode.in_loss = self.config.neutral == "uniform" or not is_neutral(q)

    def target_of(self, members: list[Episode]) -> list[float]:
        """q over completions that take part."""
        rewards = [episode.shaped_reward for episode in members]
        return reward_distribution(rewards, self.config.q_temperature, self.config.q_floor)

    def _reference(self, episode: Episode) -> float:
        length = len(episode.token_ids) if self.config.normalize_reference else 1
        return math.fsum(episode.reference_logprobs) / length

    def __call__(self, inputs: LossInputs) -> Tensor:
        """[T] the additional clip loss; the listwise loss is of sequences and only in `total`."""
        return self.clip(inputs)  # [T]

    def total(self, inputs: LossInputs, aggregation: Aggregation) -> Tensor:
        listwise = self.listwise(inputs).sum() / max(inputs.normalizers.num_groups, 1)  # 0-d
        if self.config.clip_coef == 0:
            return listwise
        return listwise + self.config.clip_coef * super().total(inputs, aggregation)

    def record(self, tally: Tally, inputs: LossInputs) -> None:
        """`maxent/weight_entropy/mean` over the groups in the loss: what the controllers steer by."""
        present = inputs.sequences.present  # [S]
        same_group = inputs.group_ids[:, None] == inputs.group_ids[None, :]  # [S, S]
        sizes = (same_group & present[None, :]).sum(dim=1).clamp(min=1)  # [S] sequences in the loss, of its group
        num_groups = (present / sizes).sum()  # 0-d
        entropy = torch.special.entr(inputs.weights * present).sum()  # 0-d, of all groups; entr(w) = -w log w
        tally.weighted_mean("maxent/weight_entropy/mean", entropy / num_groups.clamp(min=1), num_groups)

    def listwise(self, inputs: LossInputs) -> Tensor:
        """[S] -w_i log softmax_i(s) over the sequences of its group."""
        sequences = inputs.sequences
        log_prob = (
            sequences.mean(inputs.logprobs) if self.config.normalize_policy else sequences.sum(inputs.logprobs)
        )  # [S]
        same_group = inputs.group_ids[:, None] == inputs.group_ids[None, :]  # [S, S]
        # Each row keeps its own sequence, or a row of -inf alone would put NaN into the gradient.
        spans = (same_group & sequences.present[None, :]) | torch.eye(
            sequences.num, dtype=torch.bool, device=log_prob.device
        )
        rows = log_prob[None, :].expand(sequences.num, -1).masked_fill(~spans, float("-inf"))  # [S, S]
        log_share = log_prob - rows.logsumexp(dim=1)  # [S]
        return -(inputs.weights * sequences.present).to(log_prob.dtype) * log_share  # [S]

    def ratio(self, inputs: LossInputs) -> Tensor:
        return self.clip.ratio(inputs)  # [T]

    def clipped(self, inputs: LossInputs, ratio: Tensor) -> tuple[Tensor, Tensor] | None:
        return self.clip.clipped(inputs, ratio) if self.config.clip_coef > 0 else None

    def episode_metrics(self, groups: list[list[Episode]]) -> dict[str, Metric]:
        state = self.controllers.state
        metrics = {"maxent/tau": same_everywhere(state.tau), "maxent/beta": same_everywhere(state.beta)}
        return metrics | group_weight_metrics(groups, self.target_of)

    def after_update(self, stats: dict[str, float]) -> dict[str, Metric]:
        return self.controllers.after_update(stats)

    def state_dict(self) -> dict[str, Any]:
        return self.controllers.state.to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.controllers.load(state)
