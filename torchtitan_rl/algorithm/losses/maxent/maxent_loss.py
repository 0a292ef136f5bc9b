"""MaxEnt-GRPO's listwise loss."""

import math
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from statistics import StatisticsError, correlation
from typing import Any, Literal

import torch
from torch import Tensor

from torchtitan_rl.algorithm.aggregation import Aggregation
from torchtitan_rl.algorithm.losses.clip import Clip
from torchtitan_rl.algorithm.losses.loss import REFERENCE_LOGPROBS, Loss
from torchtitan_rl.algorithm.losses.loss_inputs import LossInputs, Sequences
from torchtitan_rl.algorithm.losses.maxent.controllers import (
    BetaController,
    ControllerState,
    MetaController,
    TauController,
)
from torchtitan_rl.algorithm.losses.maxent.weights import (
    entropy,
    is_neutral,
    listwise_weights,
    reward_distribution,
    softmax,
)
from torchtitan_rl.algorithm.unused import expect_defaults
from torchtitan_rl.errors import expect
from torchtitan_rl.fields.number import number
from torchtitan_rl.fields.own_config import OwnConfig
from torchtitan_rl.summary import describe, same_everywhere
from torchtitan_rl.types import Episode, FloatArray, Group, Metric

MASS = "mass"
"""In `Credit.columns`: w_i, the episode's share of its group's target distribution; 0 outside the loss."""
Q_MASS = "q_mass"
"""In `Credit.columns`: q_i, the episode's share of the distribution given by the rewards alone; 0 outside the loss."""
NO_PREFERENCE = "no preference"
"""`left_out` of the completions of a neutral group. They have weights, but no loss."""


class MaxEnt(Loss):
    """L = mean over groups of -sum_i w_i log softmax_i(s), where s_i = log pi(y_i) is the sequence log-probability.

    w is the group's target distribution (`weights.py`), computed when advantages are assigned. clip_coef > 0 adds
    clip_coef times a clip loss with advantage w_i - 1/G. The defaults are the authors' recipe for mathematics.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Loss.Config):
        tau: float = number(0.5, above=0)
        """Temperature of the weights; the initial value if a controller moves it."""
        beta: float = number(0.0, least=0)
        """Weight of the reference's log-probability; the initial value if a controller moves it. 0: no reference
        model."""
        q_temperature: float = number(2.0, least=0)
        """T_q, temperature of the distribution over rewards, in units of reward."""
        q_floor: float = number(1e-6, least=0)
        """Minimum mass of a completion in the distribution over rewards."""
        normalize_reference: bool = True
        """Divide the reference's log-probability of a completion by its length."""
        normalize_policy: bool = True
        """Divide s_i by the completion's length. Otherwise 1 / (tau T_q) must exceed the spread of s_i in a group."""
        neutral: Literal["skip", "uniform"] = "skip"
        """Handling of a group whose rewards are all equal. skip: leave it out of the loss. uniform: pull the policy
        towards the uniform distribution over its completions."""
        clip_coef: float = number(1.0, least=0)
        """Weight of the additional clip loss."""
        clip: Clip.Config = field(default_factory=Clip.Config)
        """The additional clip loss."""
        clip_ratio: Literal["token", "sequence"] = "sequence"
        """Ratio in the clip loss. token: each token's ratio, combined by algorithm.aggregation. sequence: the ratio
        exp(s_i - s_i old), summed over the group's completions and averaged over groups, as the authors do it."""
        tau_controller: TauController.Config | None = None
        """Moves tau to keep the entropy of the weights at a target."""
        beta_controller: BetaController.Config | None = None
        """Moves beta to keep the KL divergence from the reference at a target."""
        meta_controller: MetaController.Config | None = None
        """Moves tau and beta by analytic gradients. It replaces the other two controllers."""

        def __post_init__(self) -> None:
            expect(
                self.beta_controller is None or self.beta > 0, "algorithm.loss.beta", self.beta,
                "a number > 0 with a beta_controller, which multiplies beta and would keep it at 0", "Start at 0.01.",
            )  # fmt: skip
            is_clip = type(self.clip) is Clip.Config
            expected = "Clip.Config: of another loss it is the bounds alone"
            expect(is_clip, "algorithm.loss.clip", self.clip, expected, "Use it.")

        def check_objective(self, objective: OwnConfig.Config) -> None:
            """Raise UserError for settings of token losses, which have no effect here."""
            names = ("kl.coef", "credit", "seed_grpo", "advantage")
            if self.clip_coef == 0:
                names += ("aggregation", "mismatch")
            expect_defaults(objective, names, "MaxEnt, which weighs whole completions")

    learns_from = "rewards"
    whole_groups = True
    reads = (MASS,)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._clip = config.clip.build() if config.clip_coef > 0 else None
        configs: list[OwnConfig.Config | None] = [config.tau_controller, config.beta_controller]
        if config.meta_controller is not None:
            configs = [config.meta_controller]
        self._controllers = [own.build() for own in configs if own is not None]
        self._state = ControllerState(config.tau, config.beta)
        self._steered: dict[str, str] = {}
        """{"tau" or "beta", if it is moved: the metric by which}"""
        for controller in self._controllers:
            self._steered |= controller.steers
        self.controller_inputs = tuple(self._steered.values())
        if config.beta > 0 or "beta" in self._steered:
            self.reads = (MASS, REFERENCE_LOGPROBS)

    def _weigh(self, members: list[Episode]) -> None:
        """Sets the columns q_mass and mass, w_i, and the advantage w_i - 1/G of a group's completions; leaves out a neutral group."""
        floor, most = self.config.q_floor, f"less than 1 / {len(members)} completions of a group"
        expect(floor * len(members) < 1, "algorithm.loss.q_floor", floor, most, "Use 1e-6.")
        rewards = [episode.credit.shaped_reward for episode in members]
        q = reward_distribution(rewards, self.config.q_temperature, self.config.q_floor)
        beta = self._state.beta
        reference: list[float] | None = None
        if beta > 0:
            normalize = self.config.normalize_reference
            reference = [_score(e, e.reference_logprobs, normalize) for e in members]
        weights = listwise_weights(q, reference, self._state.tau, beta)
        for episode, q_mass, weight in zip(members, q, weights, strict=True):
            episode.credit.columns |= {MASS: weight, Q_MASS: q_mass}
            episode.credit.advantage = weight - 1 / len(members)
            if is_neutral(q) and self.config.neutral == "skip":
                episode.credit.left_out = NO_PREFERENCE

    def assign_credit(self, groups: list[Group[Episode]]) -> None:
        for group in groups:
            for episode in group.samples:
                episode.credit.columns |= {MASS: 0.0, Q_MASS: 0.0}
            members = [episode for episode in group.samples if episode.in_loss]
            if members:
                self._weigh(members)

    def _of_sequences(self, values: Tensor, sequences: Sequences) -> Tensor:
        """[T] -> [S]: sums of tokens' log-probabilities, or their means with `normalize_policy`."""
        return sequences.mean(values) if self.config.normalize_policy else sequences.sum(values)

    def _listwise(self, inputs: LossInputs) -> Tensor:
        """Returns [S] -w_i log softmax_i(s), with the softmax over the sequences of the same group."""
        sequences = inputs.sequences
        log_prob = self._of_sequences(inputs.logprobs, sequences)  # [S]
        # Each row keeps its own sequence, because a row of only -inf would give a NaN gradient.
        itself = torch.eye(sequences.num, dtype=torch.bool, device=log_prob.device)  # [S, S]
        same_group = inputs.group_ids[:, None] == inputs.group_ids[None, :]  # [S, S]
        spans = (same_group & sequences.present[None, :]) | itself  # [S, S]
        rows = log_prob[None, :].expand(sequences.num, -1)  # [S, S]
        rows = rows.masked_fill(~spans, float("-inf"))  # [S, S]
        log_share = log_prob - rows.logsumexp(dim=1)  # [S]
        return -(inputs.columns[MASS] * sequences.present).to(log_prob.dtype) * log_share  # [S]

    def terms(self, inputs: LossInputs, aggregation: Aggregation) -> dict[str, Tensor]:
        """Returns "policy", and its parts "listwise" and "clip" if there is a clip loss; 0-d each."""
        num_groups = max(inputs.normalizers.num_groups, 1)
        listwise = self._listwise(inputs).sum() / num_groups  # 0-d
        if self._clip is None:
            return {"policy": listwise}
        if self.config.clip_ratio == "token":
            losses = self._clip(inputs) * inputs.correction  # [T]
            clip = self.config.clip_coef * aggregation(losses, inputs)  # 0-d
        else:
            log_ratio = self._of_sequences(inputs.log_ratio, inputs.sequences)  # [S]
            losses = self._clip.clip_sequences(inputs, log_ratio) * inputs.correction  # [T]
            # All tokens of a sequence have the same loss.
            total = self.config.clip_coef * inputs.sequences.mean(losses).sum()  # 0-d
            clip = total / num_groups  # 0-d
        return {"policy": listwise + clip, "listwise": listwise, "clip": clip}

    def group_metrics(self, groups: list[Group[Episode]]) -> dict[str, Metric]:
        """Returns `maxent/...`. `maxent/weight_entropy` covers the groups in the loss. The others cover every group with a
        weighted completion, neutral groups included; controllers use `maxent/weight_entropy_with_neutral/mean` of these.
        """
        q_entropies: list[float] = []
        entropies: list[float] = []  # of w, neutral groups included
        learning: list[float] = []  # of w, of groups in the loss
        correlations: list[float] = []
        for group in groups:
            members = [e for e in group.samples if e.in_loss or e.credit.left_out == NO_PREFERENCE]
            if not members:
                continue
            q_entropies.append(entropy([e.credit.columns[Q_MASS] for e in members]))
            entropies.append(entropy([e.credit.columns[MASS] for e in members]))
            if members[0].in_loss:
                learning.append(entropies[-1])
                correlations += self._push_reward_correlation(members)
        metrics = {"maxent/tau": same_everywhere(self._state.tau)}
        metrics["maxent/beta"] = same_everywhere(self._state.beta)
        metrics |= describe("maxent/q_entropy", q_entropies)
        metrics |= describe("maxent/weight_entropy_with_neutral", entropies, ("mean", "min", "max"))
        metrics |= describe("maxent/weight_entropy", learning)
        return metrics | describe("maxent/push_reward_correlation", correlations, ("mean",))

    def _push_reward_correlation(self, members: list[Episode]) -> list[float]:
        """Returns the correlation in a group of the push w_i - softmax_i(s) with the reward; s is the sampler's.

        Nothing for a group whose rewards or pushes are all equal, or as good as equal.
        """
        normalize = self.config.normalize_policy
        scores = [_score(e, e.completion.sampler_logprobs, normalize) for e in members]
        shares = softmax(scores, 1.0)
        pushes = [e.credit.columns[MASS] - share for e, share in zip(members, shares, strict=True)]
        rewards = [e.credit.shaped_reward for e in members]
        if len(set(pushes)) < 2 or len(set(rewards)) < 2:
            return []
        with suppress(StatisticsError):  # the squares of tiny pushes underflow
            return [correlation(pushes, rewards)]
        return []

    def after_update(self, stats: dict[str, float]) -> dict[str, Metric]:
        """Moves tau and beta, and returns metrics of those that moved. A value stays if its statistic is missing in this step."""
        if not self._controllers:
            return {}
        state, moves, values = self._state, {}, {}
        for controller in self._controllers:
            moves |= controller.moves(state, stats)
        for name, move in moves.items():
            values |= {f"{name}_target": move.target, f"{name}_error": move.error}
            setattr(state, name, move.value)
        if state.weight_entropy_ema is not None:
            values["weight_entropy/ema"] = state.weight_entropy_ema
        state.step += 1
        return {f"maxent/{key}": same_everywhere(value) for key, value in values.items()}

    def state_dict(self) -> dict[str, Any]:
        return asdict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a checkpoint's state. A value that no controller moves keeps its configured value."""
        fixed = {"tau", "beta"} - self._steered.keys()
        moved = {name: value for name, value in state.items() if name not in fixed}
        self._state = replace(self._state, **moved)


def maxent_class_defaults() -> MaxEnt.Config:
    """Returns the defaults of the authors' class, which their recipe for MBPP uses too."""
    return MaxEnt.Config(
        tau=1.0,
        q_temperature=1.0,
        normalize_policy=False,
        neutral="uniform",
        clip_coef=0.0,
        clip_ratio="token",
    )


def _score(episode: Episode, logprobs: FloatArray, normalize: bool) -> float:
    """Returns the sum of a completion's log-probabilities [L] over its sampled tokens, or their mean."""
    of_sampled = logprobs[episode.completion.loss_mask].tolist()  # [num_sampled]
    return math.fsum(of_sampled) / (len(of_sampled) if normalize else 1)
