"""NaN and infinities: an error that names its source, or left out and counted."""

import math

import pytest
import torch

from tests.parts.algorithm import (
    built,
    episodes_of,
    group,
    group_of,
    normalizers_of,
    numbers,
    pack,
    policy_like,
    run_loss,
    scored,
    spread_logprobs,
)
from torchtitan_rl.algorithm import BatchStd, GroupMean, Grpo, Gspo, MaxEnt, NonFiniteError
from torchtitan_rl.algorithm.losses.seed_grpo import SeedGrpo

NAN, INF = math.nan, math.inf


def with_bad_reward(value: float):
    bad = scored(1, value, breakdown={"format": 0.5, "correct": value})
    return group_of(0, scored(0, 1.0), bad, scored(2, 0.0))


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_non_finite_reward_is_reported_with_prompt_sample_and_function(value):
    with pytest.raises(NonFiniteError, match=rf"prompt 0, sample 1: the total reward is {value}"):
        episodes_of(built(), with_bad_reward(value))


@pytest.mark.parametrize("loss", [Gspo.Config(), MaxEnt.Config()])
def test_masked_non_finite_rewards_are_excluded_and_counted(loss):
    config = {} if isinstance(loss, MaxEnt.Config) else {"advantage": GroupMean.Config()}
    algorithm = built(nonfinite="mask", loss=loss, **config)
    episodes = episodes_of(algorithm, with_bad_reward(NAN))
    clean = episodes_of(algorithm, group(0, [1.0, 0.0]))
    assert [episodes[0].credit.advantage, episodes[2].credit.advantage] == [
        episode.credit.advantage for episode in clean
    ]
    assert (episodes[1].credit.advantage, bool(episodes[1].credit.columns.get("mass"))) == (0.0, False)
    assert episodes[1].credit.left_out == "not finite: the total reward is nan"
    assert math.isnan(episodes[1].reward)


def test_non_finite_sampler_logprob_is_reported_or_masked():
    completions = group_of(0, scored(0, 1.0, logprobs=(-1.0, -INF)), scored(1, 0.0))
    with pytest.raises(NonFiniteError, match=r"prompt 0, sample 0: the sampler's log-probability of token 1 is -inf"):
        episodes_of(built(), completions)
    algorithm = built(nonfinite="mask", seed_grpo=SeedGrpo.Config())
    assert [episode.in_loss for episode in episodes_of(algorithm, completions)] == [False, True]


@pytest.mark.parametrize("rewards", [[1.7e308, 1.7e308, 0.0], [1e200, -1e200, 0.0]])
@pytest.mark.parametrize("advantage", [Grpo.Config(), BatchStd.Config()])
def test_rewards_that_overflow_mean_or_std_are_reported_or_masked(rewards, advantage):
    with pytest.raises(NonFiniteError, match=r"prompt 0, sample 0: the advantage is .*. Rewards of this size"):
        episodes_of(built(advantage=advantage), group(0, rewards))
    episodes = episodes_of(built(nonfinite="mask", advantage=advantage), group(0, rewards))
    assert [episode.credit.advantage for episode in episodes] == [0.0] * 3
    assert all(episode.credit.left_out.startswith("not finite: the advantage is") for episode in episodes)


def prepared(nonfinite: str, **kwargs):
    algorithm = built(advantage=GroupMean.Config(), nonfinite=nonfinite, **kwargs)
    episodes = episodes_of(algorithm, group(3, [1.0, 0.0]), group(5, [1.0, 0.0]))
    batch = pack(episodes, normalizers_of(algorithm, episodes), old=[[-1.0, -1.0]] * 4)
    return algorithm, episodes, batch


@pytest.mark.parametrize("field", ["advantages", "sampler_logprobs", "pi_old_logprobs"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_non_finite_value_of_a_batch_token_is_reported(field, value):
    algorithm, episodes, batch = prepared("raise")
    place = (batch.sequence_ids == 3).nonzero()[2]  # the second completion token of prompt 5, sample 1
    getattr(batch, field)[place] = value
    with pytest.raises(NonFiniteError, match=rf"prompt 5, sample 1: {field} of the token with id 4 .* is {value}"):
        run_loss(algorithm, episodes, policy_like(episodes), batch)


def test_non_finite_policy_logprob_is_reported():
    algorithm, episodes, batch = prepared("raise")
    values = policy_like(episodes)
    values[1] = torch.tensor([NAN, -1.0], dtype=torch.float64)
    with pytest.raises(NonFiniteError, match="prompt 3, sample 1: logprobs of the token"):
        run_loss(algorithm, episodes, values, batch)


@pytest.mark.parametrize("loss", [Gspo.Config(), MaxEnt.Config(clip_coef=1.0)])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_masked_non_finite_tokens_have_no_gradient_and_are_counted(loss, value):
    algorithm = built(nonfinite="mask", loss=loss, entropy_coef=0.1)
    episodes = episodes_of(algorithm, group(3, [1.0, 0.0]), group(5, [1.0, 0.0]))
    batch = pack(episodes, normalizers_of(algorithm, episodes))
    values = [
        torch.tensor([-1.0, value if i == 1 else -1.0], dtype=torch.float64, requires_grad=True) for i in range(4)
    ]
    logprobs = spread_logprobs(batch, episodes, values)
    output = algorithm.loss(batch, logprobs, torch.full_like(logprobs, 0.5))
    output.loss.backward()
    assert torch.isfinite(output.loss)
    assert all(torch.isfinite(value.grad).all() for value in values)
    assert values[1].grad[1] == 0.0
    metrics = output.read(output.tally.numbers())
    assert metrics["nonfinite/tokens"].value == 1
    assert all(math.isfinite(value) for value in numbers(metrics).values())


def test_a_ratio_that_overflows_is_clamped_and_counted():
    algorithm, episodes, batch = prepared("raise")
    values = [torch.tensor([-1.0, lp], dtype=torch.float64, requires_grad=True) for lp in (-1.0, 400.0, -1.0, -1.0)]
    loss, metrics = run_loss(algorithm, episodes, values, batch)
    assert torch.isfinite(loss)
    assert metrics["ratio/overflow_fraction"].value == 1 / 8
    assert metrics["ratio/max"].value == pytest.approx(math.exp(20))
