"""Faulty parts of an objective, as a researcher might write them, with what the message must say."""

import torch

from torchtitan_rl.core.algorithm import (
    Advantage,
    Aggregation,
    Algorithm,
    Clip,
    Correction,
    GroupFilter,
    Mismatch,
    TokenLoss,
)
from torchtitan_rl.core.algorithm.advantages import GroupScale
from torchtitan_rl.core.types import Prompt
from torchtitan_rl.library.maxent import ListwiseLoss
from torchtitan_rl.setup.registry import load_config
from torchtitan_rl.setup.trial import try_objective


class ScalarLoss(TokenLoss):
    def __call__(self, inputs):
        return -(inputs.advantages * inputs.logprobs).mean()


class DetachedLoss(TokenLoss):
    def __call__(self, inputs):
        return -inputs.advantages * inputs.logprobs.detach()


class FloatLoss(TokenLoss):
    def __call__(self, inputs):
        return float(inputs.logprobs.sum())


class ScalarRatio(TokenLoss):
    def __call__(self, inputs):
        return -inputs.advantages * inputs.logprobs

    def ratio(self, inputs):
        return inputs.log_ratio.mean().exp()


class RaisesLoss(TokenLoss):
    def __call__(self, inputs):
        return -inputs.advantages * inputs.logprobs.reshape(3, 1, -1)


class ForgetsSuper(Clip):
    def __init__(self, config):
        pass


class LogLoss(TokenLoss):
    def __call__(self, inputs):
        return -inputs.advantages * inputs.log_ratio.abs().sqrt()


class TokenListwise(ListwiseLoss):
    def weigh(self, members):
        for episode in members:
            episode.credit.columns["mass"] = 1 / len(members)

    def __call__(self, inputs):
        return -inputs.logprobs


class UnscaledListwise(TokenListwise):
    def weigh(self, members):
        for episode in members:
            episode.credit.columns["mass"] = episode.reward

    def __call__(self, inputs):
        return -inputs.columns["mass"] * inputs.sequences.sum(inputs.logprobs)


class KeepsTokens(Aggregation):
    def __call__(self, token_losses, inputs):
        return token_losses


class OneWeight(Mismatch):
    def __call__(self, log_weight, sequences):
        return Correction(log_weight.mean().exp(), log_weight > 0)


class TensorWeight(Mismatch):
    def __call__(self, log_weight, sequences):
        return log_weight.exp()


class SwappedWeight(Mismatch):
    def __call__(self, log_weight, sequences):
        return Correction(log_weight > 0, log_weight.exp())


class FailingFilter(GroupFilter):
    def left_out(self, group):
        return group.rewards


class OneFewer(Advantage):
    def of_group(self, group):
        return group.rewards[1:]


class OneMore(Advantage):
    def of_group(self, group):
        return torch.tensor([*group.rewards, 0.0])


class TextAdvantage(Advantage):
    def of_group(self, group):
        return [str(reward) for reward in group.rewards]


class InfiniteAdvantage(Advantage):
    def of_group(self, group):
        return [float("inf") for _ in group.rewards]


class SortsRewards(Advantage):
    def of_group(self, group):
        group.rewards.sort()
        return group.rewards


class SetAdvantage(Advantage):
    def of_group(self, group):
        return set(group.rewards)


class FlatAdvantage(Advantage):
    def of_step(self, rewards, groups):
        return [reward for of_group in rewards for reward in of_group]

    def of_group(self, group):
        raise AssertionError


class NoScale(GroupScale):
    def scale(self, group):
        return None


class TextZero(Clip):
    def zero_gradient(self, episode):
        return "no"


class ListState(Clip):
    def state_dict(self):
        return []


class PlainMetrics(Clip):
    def group_metrics(self, groups):
        return {"mine": 1.0}


class BareMetrics(Clip):
    def loss_metrics(self, inputs):
        return {"mine": torch.tensor(1.0)}


class FailsAfterUpdate(Clip):
    def after_update(self, stats):
        raise KeyError("tau")


class Exits(Clip):
    def assign_credit(self, groups):
        raise SystemExit(3)


CASES: list[tuple[dict[str, type], str]] = [
    (
        {"loss": ScalarLoss},
        r"algorithm.loss: ScalarLoss returned a tensor of shape \[\]: expected a tensor of shape \[9\]",
    ),
    ({"loss": DetachedLoss}, "algorithm.loss: DetachedLoss returned a loss without a gradient"),
    ({"loss": FloatLoss}, r"algorithm.loss: FloatLoss returned float: expected a tensor of shape \[9\]"),
    ({"loss": ScalarRatio}, r"algorithm.loss: ScalarRatio returned a tensor of shape \[\]: .* token of ratio"),
    ({"loss": TokenListwise}, r"TokenListwise returned a tensor of shape \[9\]: expected a tensor of shape \[2\]"),
    ({"loss": UnscaledListwise}, "UnscaledListwise.weigh set masses that sum to 3: expected 1"),
    ({"aggregation": KeepsTokens}, r"algorithm.aggregation: KeepsTokens returned a tensor of shape \[9\]"),
    ({"mismatch": OneWeight}, r"algorithm.mismatch: OneWeight returned a tensor of shape \[\]"),
    ({"mismatch": TensorWeight}, "algorithm.mismatch: TensorWeight returned Tensor: expected a Correction"),
    ({"mismatch": SwappedWeight}, "algorithm.mismatch: SwappedWeight returned Correction of torch.bool, torch.float"),
    ({"advantage": OneFewer}, "algorithm.advantage: OneFewer returned 1 values for 2: expected one for each"),
    ({"advantage": OneMore}, "algorithm.advantage: OneMore returned 3 values for 2"),
    ({"advantage": TextAdvantage}, "algorithm.advantage: TextAdvantage returned '1.0': expected a number"),
    ({"advantage": SetAdvantage}, "algorithm.advantage: SetAdvantage returned set: expected a list of 2"),
    ({"advantage": FlatAdvantage}, "algorithm.advantage: FlatAdvantage returned 2 values for 1"),
    ({"seed_grpo": NoScale}, "algorithm.seed_grpo: NoScale returned None: expected a number"),
]
"""Parts, and a pattern of the message on 9 packed tokens of 2 sequences."""


def objective(parts: dict[str, type]) -> Algorithm.Config:
    """The default objective with these parts."""
    return Algorithm.Config(**{name: part.Config() for name, part in parts.items()})


def trial(**parts: type) -> None:
    """Try these parts on debug's synthetic step."""
    config = load_config("debug")
    config.algorithm = objective(parts)
    prompt = Prompt(prompt_idx=0, text="1 + 1 =", token_ids=[1, 2, 3], expected_answer="2")
    try_objective(config, prompt, ["correct"])
