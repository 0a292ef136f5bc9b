"""A part of the objective whose result PyTorch would broadcast in silence, or that teaches nothing, is named at the first step."""

import pytest

from tests.parts.algorithm import built, episodes_of, group, normalizers_of, pack, policy_like, run_loss
from torchtitan_rl.algorithm import Correction, Mismatch, TokenLoss
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


def test_state_that_a_checkpoint_cannot_hold_is_refused_before_the_first_step():
    class Counts:
        def state_dict(self):
            return {"seen": {1, 2}}

    with pytest.raises(TypeError, match="set is not JSON serializable"):
        RunState(algorithm=Counts())
