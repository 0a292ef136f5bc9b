"""MaxEnt-GRPO's listwise loss."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from torchtitan_rl.core.algorithm.aggregations import Aggregation
from torchtitan_rl.core.algorithm.inputs import LossInputs
from torchtitan_rl.core.algorithm.losses import Clip, Gspo, ListwiseLoss
from torchtitan_rl.core.config import number
from torchtitan_rl.core.errors import expect
from torchtitan_rl.core.summary import describe, mean, same_everywhere
from torchtitan_rl.core.types import Episode, Group, Metric
from torchtitan_rl.library.maxent.controllers import BetaController, Controllers, MetaController, TauController
from torchtitan_rl.library.maxent.weights import entropy, is_neutral, listwise_weights, reward_distribution


class MaxEnt(ListwiseLoss):
    """L = mean over groups of -sum_i w_i log softmax_i(s), s_i = log pi(y_i) the sequence log-probability.

    w is the group's target distribution (`weights.py`), fixed when advantages are assigned. Optionally plus clip_coef
    times a clip loss with advantage w_i - 1/G.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ListwiseLoss.Config):
        tau: float = number(1.0, above=0)
        """Temperature of the weights (its start, with a controller)."""
        beta: float = number(0.0, least=0)
        """Weight of the reference's log-probability in the weights (its start, with a controller); 0 loads none."""
        q_temperature: float = number(1.0, least=0)
        """T_q, temperature of the distribution over rewards, in units of reward."""
        q_floor: float = number(1e-6, least=0)
        """Least mass of a completion in that distribution."""
        normalize_reference: bool = True
        """Divide the reference's log-probability of a completion by its length."""
        normalize_policy: bool = False
        """Divide s_i by the completion's length."""
        neutral: Literal["skip", "uniform"] = "skip"
        """A group whose rewards are all equal: out of the loss, or pulled towards the uniform distribution over it."""
        clip_coef: float = number(0.0, least=0)
        """Weight of the additional clip loss."""
        clip: Clip.Config = field(default_factory=Clip.Config)
        """The additional clip loss."""
        clip_ratio: Literal["token", "sequence"] = "token"
        """Token: the clip loss of each token, through algorithm.aggregation. Sequence, as the authors have it: of
        exp(s_i - s_i old), summed over the group's completions; its mean is over groups."""
        tau_controller: TauController.Config | None = None
        """Holds the entropy of the weights at a target by moving tau."""
        beta_controller: BetaController.Config | None = None
        """Holds the divergence from the reference at a target by moving beta."""
        meta_controller: MetaController.Config | None = None
        """Moves both by analytic gradients, in place of the other two."""

        def __post_init__(self) -> None:
            expect(
                self.beta_controller is None or self.beta > 0, "algorithm.loss.beta", self.beta,
                "more than 0 with a beta_controller", "It multiplies beta, which would stay 0; start at 0.01.",
            )  # fmt: skip

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.clip_coef > 0:
            by_token = config.clip_ratio == "token"
            self.token_loss = config.clip.build() if by_token else SequenceClip(config.clip, config.normalize_policy)
        alone = [config.tau_controller, config.beta_controller]
        self.controllers = Controllers(
            config.tau, config.beta, [config.meta_controller] if config.meta_controller else alone
        )
        self.controller_inputs = tuple(self.controllers.steered.values())
        self.needs_reference = config.beta > 0 or "beta" in self.controllers.steered

    def validate_group_size(self, n: int) -> None:
        floor = self.config.q_floor
        expect(
            floor * n < 1, "algorithm.loss.q_floor", floor, f"less than 1 / {n} (sampling.n), all the mass", "Use 1e-6."
        )

    def weigh(self, members: list[Episode]) -> None:
        rewards = [episode.credit.shaped_reward for episode in members]
        q = reward_distribution(rewards, self.config.q_temperature, self.config.q_floor)
        beta = self.controllers.state.beta
        reference = [self._reference(episode) for episode in members] if beta > 0 else None
        weights = listwise_weights(q, reference, self.controllers.state.tau, beta)
        for episode, q_mass, weight in zip(members, q, weights, strict=True):
            episode.credit.q_mass, episode.credit.mass, episode.credit.advantage = (
                q_mass,
                weight,
                weight - 1 / len(members),
            )
            if is_neutral(q) and self.config.neutral == "skip":
                episode.credit.left_out = "no preference"

    def _reference(self, episode: Episode) -> float:
        of_sampled = episode.reference_logprobs[episode.completion.loss_mask].tolist()  # [num_sampled]
        return math.fsum(of_sampled) / (len(of_sampled) if self.config.normalize_reference else 1)

    def __call__(self, inputs: LossInputs) -> Tensor:
        """[S] -w_i log softmax_i(s) over the sequences of its group."""
        sequences = inputs.sequences
        log_prob = (
            sequences.mean(inputs.logprobs) if self.config.normalize_policy else sequences.sum(inputs.logprobs)
        )  # [S]
        # Each row keeps its own sequence, or a row of -inf alone would put NaN into the gradient.
        spans = (inputs.same_group & sequences.present[None, :]) | torch.eye(
            sequences.num, dtype=torch.bool, device=log_prob.device
        )
        rows = log_prob[None, :].expand(sequences.num, -1).masked_fill(~spans, float("-inf"))  # [S, S]
        log_share = log_prob - rows.logsumexp(dim=1)  # [S]
        return -(inputs.mass * sequences.present).to(log_prob.dtype) * log_share  # [S]

    def terms(self, inputs: LossInputs, aggregation: Aggregation) -> dict[str, Tensor]:
        listwise = super().terms(inputs, aggregation)["policy"]  # 0-d
        if self.token_loss is None:
            return {"policy": listwise}
        losses = self.token_loss(inputs) * inputs.correction  # [T]
        if self.config.clip_ratio == "token":
            clip = self.config.clip_coef * aggregation(losses, inputs)  # 0-d
        else:
            of_sequence = inputs.sequences.mean(losses)  # [S] the tokens of a sequence share one loss
            clip = self.config.clip_coef * of_sequence.sum() / max(inputs.normalizers.num_groups, 1)  # 0-d
        return {"policy": listwise + clip, "listwise": listwise, "clip": clip}

    def loss_metrics(self, inputs: LossInputs) -> dict[str, tuple[Tensor, Tensor]]:
        """`maxent/weight_entropy/mean` over the groups in the loss: what the controllers steer by."""
        present = inputs.sequences.present  # [S]
        sizes = (inputs.same_group & present[None, :]).sum(dim=1).clamp(min=1)  # [S] in the loss, of its group
        num_groups = (present / sizes).sum()  # 0-d
        total = torch.special.entr(inputs.mass * present).sum()  # 0-d, of all groups; entr(w) = -w log w
        return {"maxent/weight_entropy/mean": (total / num_groups.clamp(min=1), num_groups)}

    def group_metrics(self, groups: list[Group[Episode]]) -> dict[str, Metric]:
        """`maxent/...`, `groups/effective_rollouts` and `groups/incorrect_mass`.

        The weights' entropy is of the groups in the loss (its mean comes from the loss itself); the others count every
        group with a weighted completion.
        """
        state = self.controllers.state
        metrics = {"maxent/tau": same_everywhere(state.tau), "maxent/beta": same_everywhere(state.beta)}
        members = [[episode for episode in group.samples if episode.credit.mass] for group in groups]
        members = [group for group in members if group]
        if not members:
            return metrics
        targets = [[episode.credit.q_mass for episode in group] for group in members]
        entropies = [entropy([episode.credit.mass for episode in group]) for group in members]
        incorrect = [math.fsum(episode.credit.mass for episode in group if is_wrong(episode)) for group in members]
        metrics |= describe("maxent/q_entropy", [entropy(q) for q in targets])
        metrics["maxent/neutral_fraction"] = same_everywhere(mean([float(is_neutral(q)) for q in targets]))
        metrics["groups/effective_rollouts"] = same_everywhere(mean([math.exp(value) for value in entropies]))
        metrics["groups/incorrect_mass"] = same_everywhere(mean(incorrect))
        learning = [(len(group), value) for group, value in zip(members, entropies, strict=True) if group[0].in_loss]
        metrics |= describe("maxent/weight_entropy", [value for _, value in learning], ("std", "min", "max"))
        shares = [value / math.log(size) for size, value in learning if size > 1]
        return metrics | describe("maxent/weight_entropy_normalized", shares, ("mean",))

    def after_update(self, stats: dict[str, float]) -> dict[str, Metric]:
        return self.controllers.after_update(stats)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.controllers.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.controllers.load(state)


class SequenceClip(Gspo):
    """The clip loss of exp(s_i - s_i old), the same on every token of a sequence."""

    def __init__(self, config: Clip.Config, normalize: bool) -> None:
        super().__init__(config)
        self.normalize = normalize

    def of_sequence(self, inputs: LossInputs) -> Tensor:
        return (inputs.sequences.mean if self.normalize else inputs.sequences.sum)(inputs.log_ratio)  # [S]


def is_wrong(episode: Episode) -> bool:
    """By the task's own judgement, or where it has none by a reward <= 0."""
    correct = episode.scored.correct
    return episode.reward <= 0 if correct is None else not correct
