"""`Algorithm` as the controller and the trainer call it."""

import numpy as np
import pytest
import torch

from tests.parts.algorithm import (
    MAX_TOKENS,
    episodes_of,
    group,
    group_of,
    merge,
    normalizers_of,
    pack,
    run_loss,
    scored,
)
from torchtitan_rl.core.algorithm import KL, Algorithm, Clip, TokenLoss
from torchtitan_rl.core.algorithm.episodes import draft_episodes
from torchtitan_rl.core.trainer import packing
from torchtitan_rl.core.types import flat
from torchtitan_rl.library.objectives import Cispo, Gspo, Reinforce, SeqMeanTokenMean


def test_normalizers_count_only_episodes_in_the_loss():
    algorithm = Algorithm.Config(zero_variance="drop").build(max_completion_tokens=MAX_TOKENS)
    episodes = episodes_of(algorithm, group(0, [1.0, 0.0]), group(1, [2.0, 2.0]))
    normalizers = normalizers_of(algorithm, episodes)
    assert (normalizers.num_tokens, normalizers.num_sequences, normalizers.num_groups) == (4, 2, 1)
    assert normalizers.max_completion_tokens == MAX_TOKENS
    rewards = ([1.0, 0.0], [2.0, 2.0], [None, 1.0])
    assert [algorithm.credit.group_left_out(group(0, values)) for values in rewards] == [
        None,
        "zero variance",
        "zero variance",
    ]


@pytest.mark.parametrize(("choice", "rounds"), [("keep", 0), ("drop", 0), ("refill", 3)])
def test_only_refill_requests_new_prompts_and_at_most_its_limit_of_times(choice, rounds):
    assert (
        Algorithm.Config(zero_variance=choice, refill_rounds=3).build(max_completion_tokens=MAX_TOKENS).refill_rounds
        == rounds
    )


def test_a_group_of_one_is_a_configuration_error():
    with pytest.raises(ValueError, match=r"sampling\.n = 1: expected at least 2"):
        Algorithm.Config().build(max_completion_tokens=MAX_TOKENS).validate_sampling(1)


def test_episode_holds_its_completion_and_its_indices():
    groups = draft_episodes([group(1, [0.0, 1.0]), group(0, [4.0])])
    assert [g.prompt.prompt_idx for g in groups] == [1, 0]
    assert [episode.reward for g in groups for episode in g.samples] == [0.0, 1.0, 4.0]
    assert all(episode.credit.advantage == 0.0 and episode.in_loss for g in groups for episode in g.samples)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([group_of(0, scored(0, 1.0), scored(0, 0.0))], "prompt 0: two completions with sample_idx 0"),
        ([group(3, [1.0]), group(3, [1.0])], "two groups with prompt_idx 3"),
    ],
)
def test_duplicate_episodes_are_named(groups, message):
    with pytest.raises(ValueError, match=message):
        draft_episodes(groups)


def test_unsampled_tokens_count_in_no_normalizer():
    """An environment's text between sampled tokens, with any numbers on it, changes no loss, gradient or metric."""
    algorithm = Algorithm.Config(kl=KL.Config(coef=0.1), aggregation=SeqMeanTokenMean.Config()).build(
        max_completion_tokens=MAX_TOKENS
    )
    plain = group(0, [1.0, 0.0], logprobs=[(-1.0, -2.0), (-3.0,)])
    mixed = group(
        0, [1.0, 0.0], logprobs=[(-1.0, 0.0, 0.0, -2.0), (0.0, -3.0)], loss_mask=[(1, 0, 0, 1), (0, 1)]
    )  # fmt: skip
    outputs = []
    for scored_group, own, other in (
        (plain, [[-1.5, -1.0], [-3.5]], [[-1.0, -1.0], [-3.0]]),
        (mixed, [[-1.5, -70.0, -9.0, -1.0], [-80.0, -3.5]], [[-1.0, -5.0, -7.0, -1.0], [0.0, -3.0]]),
    ):
        episodes = episodes_of(algorithm, scored_group, reference=other)
        batch = pack(episodes, normalizers_of(algorithm, episodes), reference=other)
        values = [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in own]
        loss, metrics = run_loss(algorithm, episodes, values, batch)
        loss.backward()
        masks = [torch.from_numpy(episode.completion.loss_mask) for episode in episodes]
        assert all(not value.grad[~mask].any() for value, mask in zip(values, masks))
        outputs.append((loss.item(), [v.grad[mask].tolist() for v, mask in zip(values, masks)], merge([metrics])))
    assert outputs[0] == outputs[1]


class Bonus(Clip):
    """Clip, and a term that pulls every token up whatever its advantage."""

    def __call__(self, inputs):
        return super().__call__(inputs) - inputs.logprobs


def test_only_a_class_that_says_so_itself_has_zero_gradient_without_an_advantage():
    episode = episodes_of(Algorithm.Config().build(max_completion_tokens=MAX_TOKENS), group(0, [1.0, 1.0]))[0]
    for loss, zero in (
        (Clip, True), (Gspo, True), (Cispo, True), (Reinforce, True), (Bonus, False),
        (type("OfGspo", (Gspo,), {}), False), (type("Sure", (Bonus,), {"zero_gradient": lambda self, episode: True}), True),
    ):  # fmt: skip
        algorithm = Algorithm.Config(loss=loss.Config()).build(max_completion_tokens=MAX_TOKENS)
        assert algorithm.zero_gradient(episode) is zero, loss


class Demonstrations(TokenLoss):
    """-log pi of tokens that nobody sampled, weighed by a column of the credit."""

    uses_rewards = uses_advantages = from_engine = False
    token_columns = ("weight",)

    def assign_credit(self, groups):
        for episode in flat(groups):
            length = len(episode.completion.token_ids)
            episode.credit.token_columns["weight"] = np.arange(1, 1 + length, dtype=np.float32)  # [L]

    def __call__(self, inputs):
        return -inputs.token_columns["weight"] * inputs.logprobs  # [T]


def test_a_loss_of_given_tokens_needs_no_reward_no_sampler_and_no_second_sample():
    algorithm = Algorithm.Config(loss=Demonstrations.Config()).build(max_completion_tokens=MAX_TOKENS)
    algorithm.validate_sampling(1)
    groups = [group(0, [None], logprobs=[(0.0, 0.0)]), group(1, [None], logprobs=[(0.0, 0.0, 0.0)])]
    episodes = episodes_of(algorithm, *groups)
    assert all(episode.in_loss for episode in episodes)
    batch = packing.pack(
        episodes.members, normalizers=normalizers_of(algorithm, episodes), multiple=16, token_columns=("weight",)
    )
    values = [torch.tensor(row, requires_grad=True) for row in ([-1.0, -2.0], [-1.0, -1.0, -3.0])]
    loss, metrics = run_loss(algorithm, episodes, values, batch)
    loss.backward()
    assert loss.item() == pytest.approx((1 + 2 * 2 + 1 + 2 + 3 * 3) / 5)
    assert values[1].grad.tolist() == pytest.approx([-1 / 5, -2 / 5, -3 / 5])
    assert not [key for key in metrics if key.startswith("sampler/")]
