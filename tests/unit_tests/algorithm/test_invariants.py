"""Properties every objective must have; they need no oracle."""

import math

import pytest
import torch

from tests.parts.algorithm import (
    MAX_TOKENS,
    episodes_of,
    group,
    merge,
    normalizers_of,
    pack,
    policy_like,
    run_loss,
)
from torchtitan_rl.algorithm import (
    KL,
    Algorithm,
    BatchStd,
    Cispo,
    Clip,
    GroupMean,
    Gspo,
    MaxEnt,
    Reinforce,
    Rloo,
    SeqMeanTokenMean,
    SeqSumConst,
    SequenceTruncate,
    TokenMask,
    TokenTruncate,
    Truncation,
)
from torchtitan_rl.algorithm.losses.seed_grpo import SeedGrpo

ALGORITHMS = {
    "grpo": Algorithm.Config(aggregation=SeqMeanTokenMean.Config()),
    "dapo": Algorithm.Config(
        loss=Clip.Config(eps_high=0.28, dual_clip=3.0), truncation=Truncation.Config(mode="penalty")
    ),
    "dr_grpo": Algorithm.Config(advantage=GroupMean.Config(), aggregation=SeqSumConst.Config()),
    "rloo": Algorithm.Config(advantage=Rloo.Config(), loss=Reinforce.Config(), aggregation=SeqMeanTokenMean.Config()),
    "gspo": Algorithm.Config(loss=Gspo.Config(eps_low=0.05, eps_high=0.05), aggregation=SeqMeanTokenMean.Config()),
    "cispo": Algorithm.Config(advantage=BatchStd.Config(), loss=Cispo.Config(cap=1.05)),
    "seed_grpo": Algorithm.Config(seed_grpo=SeedGrpo.Config(), mismatch=SequenceTruncate.Config(cap=1.01)),
    "kl": Algorithm.Config(kl=KL.Config(coef=0.1), entropy_coef=0.01, mismatch=TokenTruncate.Config(cap=1.01)),
    "icepop": Algorithm.Config(mismatch=TokenMask.Config(low=0.99, high=1.01)),
    "maxent_sequences": Algorithm.Config(loss=MaxEnt.Config(clip_coef=0.5, clip_ratio="sequence", tau=0.3)),
    "maxent": Algorithm.Config(loss=MaxEnt.Config(clip_coef=0.5, tau=0.3), zero_variance="drop"),
}
each_algorithm = pytest.mark.parametrize("name", ALGORITHMS)


def ragged_step(algorithm: Algorithm):
    """Three groups of three completions of 1 to 9 tokens, one group without preference."""
    rewards = [[1.0, 0.0, 0.25], [0.1, 0.1, 0.1], [0.0, 0.0, 1.0]]
    groups = []
    for prompt_idx, row in enumerate(rewards):
        lengths = [1 + (4 * prompt_idx + 3 * i) % 9 for i in range(3)]
        logprobs = [tuple(-0.5 - 0.1 * ((t + i) % 4) for t in range(n)) for i, n in enumerate(lengths)]
        groups.append(group(prompt_idx, row, logprobs=logprobs, answer=["4", "5", "4"]))
    reference = [[lp - 0.3 for lp in one.completion.sampler_logprobs.tolist()] for g in groups for one in g.samples]
    return episodes_of(algorithm, *groups, reference=reference)


def gradients(algorithm: Algorithm, episodes, layouts: list[dict], *, on_policy: bool = False):
    """Loss, gradients and merged metrics of a step cut into the given micro-batches."""
    values = policy_like(episodes, 0.2)
    normalizers = normalizers_of(algorithm, episodes)
    extra = {"reference": [(episode.completion.sampler_logprobs - 0.3).tolist() for episode in episodes]}
    if not on_policy:
        extra["old"] = [(episode.completion.sampler_logprobs + 0.1).tolist() for episode in episodes]
    outputs = [
        run_loss(algorithm, episodes, values, pack(episodes, normalizers, **layout, **extra)) for layout in layouts
    ]
    for output in outputs:
        output.loss.backward()
    grads = [torch.zeros_like(value) if value.grad is None else value.grad for value in values]
    return sum(output.loss.item() for output in outputs), grads, merge([output.metrics for output in outputs])


def assert_same(one, other):
    assert other[0] == pytest.approx(one[0], abs=1e-14)
    for mine, theirs in zip(one[1], other[1], strict=True):
        assert torch.allclose(mine, theirs, atol=1e-15, rtol=1e-12)
    assert other[2] == pytest.approx(one[2], abs=1e-12)


@each_algorithm
@pytest.mark.parametrize("on_policy", [True, False])
def test_loss_is_independent_of_packing_padding_order_and_micro_batches(name, on_policy):
    algorithm = ALGORITHMS[name].build(max_completion_tokens=MAX_TOKENS)
    episodes = ragged_step(algorithm)
    reference = gradients(algorithm, episodes, [{}], on_policy=on_policy)
    layouts = {
        "padding at the end": [{"padding": 13}],
        "padding after each sequence": [{"padding": 5, "pad_each": True}],
        "row order": [{"order": [8, 3, 1, 0, 7, 5, 2, 4, 6]}],
        "micro-batches of groups": [{"order": [6, 7, 8]}, {"order": [5, 4, 3], "padding": 2}, {"order": [0, 2, 1]}],
        "an idle micro-batch": [{"order": [0, 1, 2, 6, 7, 8]}, {"order": [3, 4, 5]}, {"order": [], "padding": 4}],
    }
    if not algorithm.policy_loss.whole_groups:
        layouts["one sequence each"] = [{"order": [index]} for index in (4, 0, 8, 2, 6, 1, 3, 7, 5)]
    for layout in layouts.values():
        assert_same(reference, gradients(algorithm, episodes, layout, on_policy=on_policy))


@each_algorithm
def test_equal_rewards_give_zero_gradient(name):
    config = ALGORITHMS[name]
    if config.entropy_coef or config.kl.coef:
        config = Algorithm.Config(mismatch=config.mismatch)  # an entropy bonus and a KL term pull by themselves
    algorithm = config.build(max_completion_tokens=MAX_TOKENS)
    episodes = episodes_of(algorithm, *(group(i, [0.1] * 3) for i in range(2)), reference=[[-1.3, -1.3]] * 6)
    loss, grads, _ = gradients(algorithm, episodes, [{}])
    assert loss == 0.0
    assert all(not grad.any() for grad in grads)


@each_algorithm
def test_the_first_update_is_exactly_on_policy(name):
    algorithm = ALGORITHMS[name].build(max_completion_tokens=MAX_TOKENS)
    _, _, metrics = gradients(algorithm, ragged_step(algorithm), [{}], on_policy=True)
    assert [metrics[f"ratio/{part}"] for part in ("mean", "min", "max")] == [1.0, 1.0, 1.0]
    assert [metrics[f"policy/kl_{k}"] for k in ("k1", "k2", "k3")] == [0.0, 0.0, 0.0]
    assert metrics.get("ratio/clip_fraction", 0.0) == 0.0


@each_algorithm
def test_batch_without_loss_tokens_has_loss_zero_with_a_gradient(name):
    algorithm = ALGORITHMS[name].build(max_completion_tokens=MAX_TOKENS)
    episodes = ragged_step(algorithm)
    for episode in episodes:
        episode.credit.left_out = "for this test"
    values = policy_like(episodes)
    reference = [episode.completion.sampler_logprobs.tolist() for episode in episodes]
    batch = pack(episodes, normalizers_of(algorithm, episodes), reference=reference)
    loss = run_loss(algorithm, episodes, values, batch).loss
    loss.backward()
    assert loss.item() == 0.0
    assert all(torch.equal(value.grad, torch.zeros_like(value)) for value in values)


def test_float32_agrees_with_float64():
    algorithm = ALGORITHMS["kl"].build(max_completion_tokens=MAX_TOKENS)
    episodes = ragged_step(algorithm)
    normalizers = normalizers_of(algorithm, episodes)
    reference = [(episode.completion.sampler_logprobs - 0.3).tolist() for episode in episodes]
    losses = []
    for dtype in (torch.float32, torch.float64):
        values = [value.detach().to(dtype) for value in policy_like(episodes, 0.2)]
        losses.append(
            run_loss(algorithm, episodes, values, pack(episodes, normalizers, dtype=dtype, reference=reference)).loss
        )
    assert losses[0].dtype == torch.float32
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    assert math.isfinite(losses[0].item())
