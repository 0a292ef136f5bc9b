"""Parts of the objective that are wrong: a result that PyTorch would broadcast in silence, nothing to learn, settings without effect."""

import pytest

from tests.parts.algorithm import built, episodes_of, group, normalizers_of, pack, policy_like, run_loss
from torchtitan_rl.algorithm import (
    KL,
    Advantage,
    Algorithm,
    Correction,
    Distill,
    EntropyBonus,
    ExactDistill,
    Gdpo,
    GroupMean,
    MaxEnt,
    Mismatch,
    Nll,
    OptimalBaseline,
    RoleBaseline,
    SeqMeanTokenMean,
    TargetEntropy,
    TokenLoss,
    TokenTruncate,
    Truncation,
)
from torchtitan_rl.algorithm.losses.seed_grpo import SeedGrpo
from torchtitan_rl.errors import UserError
from torchtitan_rl.state import RunState


class ScalarLoss(TokenLoss):
    def __call__(self, inputs):
        return -(inputs.advantages * inputs.logprobs).mean()


class FloatLoss(TokenLoss):
    def __call__(self, inputs):
        return inputs.logprobs.sum().item()


class DetachedLoss(TokenLoss):
    def __call__(self, inputs):
        return -inputs.advantages * inputs.logprobs.detach()


class OneWeight(Mismatch):
    def __call__(self, log_weight, sequences):
        return Correction(log_weight.mean().exp(), log_weight > 0)


class SwappedWeight(Mismatch):
    def __call__(self, log_weight, sequences):
        return Correction(log_weight > 0, log_weight.exp())


def take_step(algorithm):
    episodes = episodes_of(algorithm, group(0, [1.0, 0.0]))
    batch = pack(episodes, normalizers_of(algorithm, episodes))
    run_loss(algorithm, episodes, policy_like(episodes), batch)


@pytest.mark.parametrize(
    ("field", "part", "message"),
    [
        ("loss", ScalarLoss, r"ScalarLoss returned a torch.float64 tensor of shape \[\]: expected floats of shape"),
        ("loss", FloatLoss, "FloatLoss returned float: expected floats"),
        ("loss", DetachedLoss, "DetachedLoss returned a loss without a gradient, so nothing would be learned"),
        ("mismatch", OneWeight, r"OneWeight returned .* of shape \[\]: expected floats of shape \[8\]"),
        ("mismatch", SwappedWeight, r"SwappedWeight returned a torch.bool tensor of shape \[8\]: expected floats"),
    ],
)
def test_faulty_part_is_named_at_the_first_step(field, part, message):
    algorithm = built(**{field: part.Config()})
    with pytest.raises(UserError, match=rf"^algorithm\.{field}: {message}"):
        take_step(algorithm)


CHANGED = {
    "advantage": GroupMean.Config(),
    "aggregation": SeqMeanTokenMean.Config(),
    "credit": "turn",
    "entropy_coef": 0.1,
    "kl": KL.Config(coef=0.1),
    "mismatch": TokenTruncate.Config(),
    "old_logprobs": "sampler",
    "seed_grpo": SeedGrpo.Config(),
    "truncation": Truncation.Config(mode="mask"),
    "zero_variance": "drop",
}
IGNORED = [
    (part, name.partition(".")[0])
    for part in (Distill, ExactDistill, Nll, TargetEntropy, OptimalBaseline, RoleBaseline, EntropyBonus, Gdpo)
    for name in part.ignores
]
IGNORED += [(MaxEnt, name) for name in ("kl", "credit", "seed_grpo", "advantage", "aggregation", "mismatch")]


@pytest.mark.parametrize(("part", "name"), IGNORED)
def test_setting_without_effect_is_refused(part, name):
    config = MaxEnt.Config(clip_coef=0.0) if part is MaxEnt else part.Config()
    field = "advantage" if issubclass(part, Advantage) else "loss"
    with pytest.raises(UserError, match=rf"^algorithm\.{name}.* with {part.__name__}"):
        Algorithm.Config(**{field: config, name: CHANGED[name]})
    Algorithm.Config(**{name: CHANGED[name]})


def test_state_that_a_checkpoint_cannot_hold_is_refused_before_the_first_step():
    class Counts:
        def state_dict(self):
            return {"seen": {1, 2}}

    with pytest.raises(TypeError, match="set is not JSON serializable"):
        RunState(algorithm=Counts())
