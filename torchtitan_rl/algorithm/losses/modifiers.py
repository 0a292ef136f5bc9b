"""Token losses made of another token loss, `loss`: with a mask, a penalty, a bonus or another baseline.

They nest, with the outer one first. Example: SquaredLogRatio.Config(loss=Dppo.Config()) is prime-rl's default. `TargetEntropy` adds a
term beside the tokens' losses, so it is the outermost.
"""

from abc import ABC
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from torchtitan_rl.algorithm.advantages import Grpo
from torchtitan_rl.algorithm.losses.loss import (
    Aggregation,
    Clip,
    Loss,
    LossInputs,
    Source,
    TokenLoss,
)
from torchtitan_rl.errors import expect
from torchtitan_rl.fields.number import number
from torchtitan_rl.summary import same_everywhere
from torchtitan_rl.types import Episode, Group, Metric, Prompt, TrainBatch

if TYPE_CHECKING:
    from torchtitan_rl.algorithm.algorithm import Algorithm

DECLARED = (*Loss.__annotations__, *TokenLoss.__annotations__)
"""What a loss declares in fields."""
ENTROPY = "policy/entropy"


class Modifier(TokenLoss, ABC):
    """The loss `loss`, as it is. A subclass changes one thing; what it does not override is that of `loss`."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenLoss.Config):
        loss: TokenLoss.Config = field(default_factory=Clip.Config)
        """The loss that is changed."""

        def check_objective(self, objective: "Algorithm.Config") -> None:
            self.loss.check_objective(objective)
            own, loss = self._owner.__name__, self.loss.build()
            expected = f"a loss without terms beside its tokens', which {own} would lose"
            tokens_alone = isinstance(loss, TokenLoss) and type(loss).terms is TokenLoss.terms
            expect(
                tokens_alone,
                f"{own}.loss",
                self.loss,
                expected,
                "A modifier with a term goes outside.",
            )
            for name in self._owner.needs:
                expected = f"a loss with {name}, without which {own} has no effect"
                expect(
                    getattr(loss, name), f"{own}.loss", self.loss, expected, "Use Clip.Config()."
                )

    needs: ClassVar[tuple[str, ...]] = ()
    """Fields of `loss` that must be true. Otherwise the modifier has no effect."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.loss = config.loss.build()
        for name in DECLARED:
            setattr(self, name, getattr(self.loss, name))

    @property
    def ratio_loss(self) -> TokenLoss | None:
        return None if self.loss.ratio_loss is None else self

    def check_batch(self, batch: TrainBatch) -> None:
        self.loss.check_batch(batch)

    def sources(self, trainer: Any) -> list[Source]:
        return self.loss.sources(trainer)

    def validate_group_size(self, n: int) -> None:
        self.loss.validate_group_size(n)

    def assign_credit(self, groups: list[Group[Episode]]) -> None:
        self.loss.assign_credit(groups)

    def zero_gradient(self, episode: Episode) -> bool:
        return self.loss.zero_gradient(episode)

    def __call__(self, inputs: LossInputs) -> Tensor:
        return self.loss(inputs)  # [T]

    def log_ratio(self, inputs: LossInputs) -> Tensor:
        return self.loss.log_ratio(inputs)  # [T]

    def ratio(self, inputs: LossInputs) -> Tensor:
        return self.loss.ratio(inputs)  # [T]

    def clipped(self, inputs: LossInputs, ratio: Tensor) -> dict[str, Tensor]:
        return self.loss.clipped(inputs, ratio)

    def loss_metrics(self, inputs: LossInputs) -> dict[str, tuple[Tensor, Tensor]]:
        return self.loss.loss_metrics(inputs)

    def group_metrics(self, groups: list[Group[Episode]]) -> dict[str, Metric]:
        return self.loss.group_metrics(groups)

    def after_update(self, stats: dict[str, float]) -> dict[str, Metric]:
        return self.loss.after_update(stats)

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss.load_state_dict(state["loss"])


def mean_of(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of `values` [T] where `mask` [T] is not 0, and the number of these tokens; 0-d each."""
    return (values * mask).sum() / mask.sum().clamp(min=1), mask.sum()


class SquaredLogRatio(Modifier):
    """l_t + coef (log pi - log pi_old)^2 on every token in the loss. Kimi K2.5, arXiv 2602.02276.

    With `algorithm.old_logprobs` "sampler" pi_old is the sampler, as in prime-rl, whose coef is 1e-3.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Modifier.Config):
        coef: float = number(1e-3, above=0)
        """Weight of the square, in the loss per squared nat."""

    needs = ("from_engine",)

    def zero_gradient(self, episode: Episode) -> bool:
        return False

    def __call__(self, inputs: LossInputs) -> Tensor:
        return super().__call__(inputs) + self.config.coef * inputs.log_ratio.square()  # [T]


class OffPolicyMask(Modifier):
    """Loss 0 where A < 0 in a sequence with mean_t (log mu - log pi) > delta. DeepSeek-V3.2, arXiv 2512.02556 eq. 9.

    mu is the sampler, so the mean covers both older weights and another arithmetic. Masked tokens count in the mean.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Modifier.Config):
        delta: float = number(0.5, above=0)
        """The largest mean that is kept, in nats per token. The paper gives no value; this is TRL's example."""

    needs = ("uses_rewards",)

    def masked(self, inputs: LossInputs) -> Tensor:
        """[T] bool, true where the loss is 0."""
        far = (
            inputs.sequences.mean(inputs.sampler_logprobs - inputs.logprobs.detach())
            > self.config.delta
        )  # [S]
        return (inputs.advantages < 0) & (
            inputs.sequences.expand(far.to(inputs.mask.dtype)) > 0
        )  # [T]

    def __call__(self, inputs: LossInputs) -> Tensor:
        return torch.where(self.masked(inputs), 0.0, super().__call__(inputs))  # [T]

    def loss_metrics(self, inputs: LossInputs) -> dict[str, tuple[Tensor, Tensor]]:
        masked = self.masked(inputs).to(inputs.mask.dtype)  # [T]
        return super().loss_metrics(inputs) | {
            "off_policy/masked_fraction": mean_of(masked, inputs.mask)
        }


class TopEntropy(Modifier):
    """Loss 0 but for the tokens of the highest entropy, a fifth by default. Beyond the 80/20 rule, arXiv 2506.01939.

    The threshold is that of all tokens of the micro-batch, also without an advantage; the paper's is that of the batch. The other tokens
    count in the mean.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Modifier.Config):
        fraction: float = number(0.2, above=0, most=1)
        """Share of the tokens that are trained on."""

    def zero_gradient(self, episode: Episode) -> bool:
        return False  # a micro-batch without these tokens would have another threshold

    def chosen(self, inputs: LossInputs) -> Tensor:
        """[T] bool, true on the tokens that are trained on."""
        entropy = inputs.entropy.detach()  # [T]
        inside = torch.where(inputs.mask > 0, entropy, torch.nan)  # [T]
        return entropy >= inside.nanquantile(1 - self.config.fraction)  # [T]

    def __call__(self, inputs: LossInputs) -> Tensor:
        return torch.where(self.chosen(inputs), super().__call__(inputs), 0.0)  # [T]

    def loss_metrics(self, inputs: LossInputs) -> dict[str, tuple[Tensor, Tensor]]:
        chosen = self.chosen(inputs) * inputs.mask  # [T]
        return super().loss_metrics(inputs) | {"top_entropy/mean": mean_of(inputs.entropy, chosen)}


class TargetEntropy(Modifier):
    """l - c H(pi), c the entropy bonus that holds the entropy at a target. Skywork-OR1, arXiv 2505.22312.

    After each step c rises by `step` if the step's entropy is at most `target`, else falls by it, between 0 and `most`. The bonus is
    given only while the last step's entropy is at most `target`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Modifier.Config):
        target: float = number(0.2, above=0)
        """The entropy to keep, in nats per token."""
        step: float = number(0.005, above=0)
        """The change of c in one step."""
        most: float = number(1.0, above=0)
        """The largest c."""

        def check_objective(self, objective: "Algorithm.Config") -> None:
            Modifier.Config.check_objective(self, objective)
            constant, remedy = objective.entropy_coef, "TargetEntropy gives the bonus."
            expect(
                constant == 0,
                "algorithm.entropy_coef",
                constant,
                "0 with the loss TargetEntropy",
                remedy,
            )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.needs_entropy_gradient = True
        self.controller_inputs = (*self.loss.controller_inputs, ENTROPY)
        self.coef = 0.0
        self.active = False

    def zero_gradient(self, episode: Episode) -> bool:
        return not self.active and super().zero_gradient(episode)

    def terms(self, inputs: LossInputs, aggregation: Aggregation) -> dict[str, Tensor]:
        terms = super().terms(inputs, aggregation)
        if self.active:
            bonus = (
                self.coef
                * (inputs.entropy * inputs.mask).sum()
                / max(inputs.normalizers.num_tokens, 1)
            )  # 0-d
            terms["policy"] = terms["policy"] - bonus
        return terms

    def after_update(self, stats: dict[str, float]) -> dict[str, Metric]:
        metrics = super().after_update(stats) | {
            "entropy/coef": same_everywhere(self.coef if self.active else 0.0)
        }
        if ENTROPY in stats:
            self.active = stats[ENTROPY] <= self.config.target
            moved = self.coef + (self.config.step if self.active else -self.config.step)
            self.coef = min(max(moved, 0.0), self.config.most)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"coef": self.coef, "active": self.active}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.coef, self.active = state["coef"], state["active"]


class OwnBaseline(Modifier, ABC):
    """A modifier that sets the advantages itself."""

    @dataclass(kw_only=True, slots=True)
    class Config(Modifier.Config):
        def check_objective(self, objective: "Algorithm.Config") -> None:
            Modifier.Config.check_objective(self, objective)
            unused = {
                "advantage": Grpo.Config(),
                "credit": "episode",
                "zero_variance": "keep",
                "seed_grpo": None,
            }
            remedy = f"{self._owner.__name__} sets the advantages. Leave it out."
            for name, only in unused.items():
                value = getattr(objective, name)
                expect(value == only, f"algorithm.{name}", value, f"the default, {only}", remedy)

    needs = ("uses_advantages",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.uses_advantages = False


class RoleBaseline(OwnBaseline):
    """A_i = r_i - b, then b <- decay b + (1 - decay) r_i, one b for each task and role. SPIRAL's RAE, arXiv 2506.24119.

    b starts at 0 and covers all earlier samples, in the order of prompts and samples. The group is no baseline, so a role that
    always wins has advantages near 0 as well.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OwnBaseline.Config):
        column: str = "role"
        """The prompt's column with the role; a prompt without it has the role ""."""
        decay: float = number(0.95, least=0, below=1)
        """Weight of b in the next b."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.baselines: dict[str, float] = {}

    def role(self, prompt: Prompt) -> str:
        """The prompt's task and role. Example: "poker/first"."""
        return f"{prompt.task}/{prompt.columns.get(self.config.column, '')}".strip("/")

    def assign_credit(self, groups: list[Group[Episode]]) -> None:
        for group in groups:
            role = self.role(group.prompt)
            for episode in group.samples:
                reward = episode.credit.shaped_reward
                if reward is None:
                    continue
                baseline = self.baselines.get(role, 0.0)
                episode.credit.advantage = reward - baseline
                self.baselines[role] = (
                    self.config.decay * baseline + (1 - self.config.decay) * reward
                )
        super().assign_credit(groups)

    def group_metrics(self, groups: list[Group[Episode]]) -> dict[str, Metric]:
        metrics = super().group_metrics(groups)
        for role, baseline in self.baselines.items():
            metrics[f"role_baseline/{role or 'all'}"] = same_everywhere(baseline)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"baselines": dict(self.baselines)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.baselines = dict(state["baselines"])
