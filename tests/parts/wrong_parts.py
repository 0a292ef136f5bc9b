"""Faulty parts of an objective, as a researcher might write them, with what the message must say."""

from torchtitan_rl.algorithm import (
    Advantage,
    Algorithm,
    Clip,
    Correction,
    GroupFilter,
    Mismatch,
    TokenLoss,
)
from torchtitan_rl.algorithm.losses.maxent import ListwiseLoss
from torchtitan_rl.build.trial import try_objective
from torchtitan_rl.command.registry import load_config
from torchtitan_rl.types import Prompt


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


class OneWeight(Mismatch):
    def __call__(self, log_weight, sequences):
        return Correction(log_weight.mean().exp(), log_weight > 0)


class SwappedWeight(Mismatch):
    def __call__(self, log_weight, sequences):
        return Correction(log_weight > 0, log_weight.exp())


class FailingFilter(GroupFilter):
    def left_out(self, group):
        return group.rewards


class OneFewer(Advantage):
    def of_group(self, group):
        return group.rewards[1:]


class UnorderedAdvantage(Advantage):
    def of_group(self, group):
        return {reward - 0.5 for reward in group.rewards}


class InfiniteAdvantage(Advantage):
    def of_group(self, group):
        return [float("inf") for _ in group.rewards]


class PlainMetrics(Clip):
    def group_metrics(self, groups):
        return {"mine": 1.0}


class FailsAfterUpdate(Clip):
    def after_update(self, stats):
        raise KeyError("tau")


class Exits(Clip):
    def assign_credit(self, groups):
        raise SystemExit(3)


CASES: list[tuple[dict[str, type], str]] = [
    (
        {"loss": ScalarLoss},
        r"algorithm.loss: ScalarLoss returned a tensor of shape \[\]: expected a tensor of shape \[\d+\]",
    ),
    ({"loss": DetachedLoss}, "algorithm.loss: DetachedLoss returned a loss without a gradient"),
    ({"loss": FloatLoss}, r"algorithm.loss: FloatLoss returned float: expected a tensor of shape \[\d+\]"),
    ({"loss": ScalarRatio}, r"algorithm.loss: ScalarRatio returned a tensor of shape \[\]: .* for each packed token"),
    ({"loss": TokenListwise}, r"TokenListwise returned a tensor of shape \[\d+\]: .* for each packed sequence"),
    ({"mismatch": OneWeight}, r"algorithm.mismatch: OneWeight returned a tensor of shape \[\]"),
    ({"mismatch": SwappedWeight}, r"SwappedWeight returned a tensor of shape \[\d+\], a mask"),
    ({"advantage": InfiniteAdvantage}, "algorithm.advantage: InfiniteAdvantage gives NaN or infinite advantages on"),
    ({"advantage": UnorderedAdvantage}, "UnorderedAdvantage raised TypeError: 'set' object is not subscriptable"),
    ({"advantage": OneFewer}, r"on a synthetic step of two groups OneFewer raised ValueError: zip\(\)"),
    ({"loss": RaisesLoss}, r"raised RuntimeError: The size .*wrong_parts.py, line \d+\). Correct it"),
]
"""Parts, and a pattern of the message."""


def objective(parts: dict[str, type]) -> Algorithm.Config:
    """The default objective with these parts."""
    return Algorithm.Config(**{name: part.Config() for name, part in parts.items()})


def trial(**parts: type) -> None:
    """Try these parts on debug's synthetic step."""
    config = load_config("debug")
    config.algorithm = objective(parts)
    prompt = Prompt(prompt_idx=0, text="1 + 1 =", token_ids=[1, 2, 3], expected_answer="2")
    try_objective(config, prompt, ["correct"])
