"""`Algorithm` as the controller and the trainer call it."""

import numpy as np
import pytest
import torch

from tests.parts.algorithm import MAX_TOKENS, built, episodes_of, group, normalizers_of, run_loss
from torchtitan_rl.algorithm import Cispo, Clip, Gspo, OffPolicyMask, Reinforce, SquaredLogRatio, TokenLoss, TopEntropy
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.trainer import packing
from torchtitan_rl.types import flat


def test_normalizers_count_only_episodes_in_the_loss():
    algorithm = built(zero_variance="drop")
    episodes = episodes_of(algorithm, group(0, [1.0, 0.0]), group(1, [2.0, 2.0]))
    normalizers = normalizers_of(algorithm, episodes)
    assert (normalizers.num_tokens, normalizers.num_sequences, normalizers.num_groups) == (4, 2, 1)
    assert normalizers.max_completion_tokens == MAX_TOKENS
    rewards = ([1.0, 0.0], [2.0, 2.0], [None, 1.0])
    reasons = [algorithm.credit.group_left_out(group(0, values)) for values in rewards]
    assert reasons == [None, "zero variance", "zero variance"]


def test_a_group_of_one_is_a_configuration_error():
    with pytest.raises(ValueError, match=r"sampling\.n = 1: expected at least 2"):
        built().validate_sampling(1)


def test_groups_with_one_prompt_idx_are_refused():
    with pytest.raises(ValueError, match=r"prompt_idx must differ .* \[3, 0, 3\]"):
        draft_episodes([group(3, [1.0]), group(0, [1.0]), group(3, [0.0])])


class Bonus(Clip):
    """Clip, and a term that pulls every token up whatever its advantage."""

    def __call__(self, inputs):
        return super().__call__(inputs) - inputs.logprobs


def test_only_a_class_that_says_so_itself_has_zero_gradient_without_an_advantage():
    episode = episodes_of(built(), group(0, [1.0, 1.0]))[0]
    for loss, zero in (
        (Clip, True), (Gspo, True), (Cispo, True), (Reinforce, True), (Bonus, False),
        (type("OfGspo", (Gspo,), {}), False), (type("Sure", (Gspo,), {"zero_without_advantage": True}), True),
        (OffPolicyMask, True), (type("Masked", (OffPolicyMask,), {}), False), (TopEntropy, False), (SquaredLogRatio, False),
    ):  # fmt: skip
        algorithm = built(loss=loss.Config())
        assert algorithm.zero_gradient(episode) is zero, loss


class Demonstrations(TokenLoss):
    """-log pi of tokens that nobody sampled, weighed by a column of the credit."""

    learns_from = "demonstrations"
    reads = ("weight",)

    def assign_credit(self, groups):
        for episode in flat(groups):
            length = len(episode.completion.token_ids)
            episode.credit.token_columns["weight"] = np.arange(1, 1 + length, dtype=np.float32)  # [L]

    def __call__(self, inputs):
        return -inputs.token_columns["weight"] * inputs.logprobs  # [T]


def test_a_loss_of_given_tokens_needs_no_reward_no_sampler_and_no_second_sample():
    algorithm = built(loss=Demonstrations.Config())
    algorithm.validate_sampling(1)
    groups = [group(0, [None], logprobs=[(0.0, 0.0)]), group(1, [None], logprobs=[(0.0, 0.0, 0.0)])]
    episodes = episodes_of(algorithm, *groups)
    assert all(episode.in_loss for episode in episodes)
    batch = packing.pack(
        episodes.members, normalizers=normalizers_of(algorithm, episodes), multiple=16, columns=("weight",)
    )
    values = [torch.tensor(row, requires_grad=True) for row in ([-1.0, -2.0], [-1.0, -1.0, -3.0])]
    loss, metrics = run_loss(algorithm, episodes, values, batch)
    loss.backward()
    assert loss.item() == pytest.approx((1 + 2 * 2 + 1 + 2 + 3 * 3) / 5)
    assert values[1].grad.tolist() == pytest.approx([-1 / 5, -2 / 5, -3 / 5])
    assert not [key for key in metrics if key.startswith("sampler/")]
