"""`Algorithm` as the controller and the trainer call it."""

import pytest
import torch

from tests.unit_tests.algorithm.algorithm_builders import (
    MAX_TOKENS,
    episodes_of,
    group,
    merge,
    pack,
    policy_like,
    prompt,
    run_loss,
    scored,
)
from torchtitan_rl.algorithm import Algorithm, GroupMean, SeqSumConst


def test_the_first_update_has_ratio_one_no_clipping_and_no_policy_kl():
    algorithm = Algorithm.Config().build()
    episodes = episodes_of(algorithm, group(0, [1.0, 0.0]), group(1, [0.0, 2.0]))
    batch = pack(episodes, algorithm.normalizers(episodes, max_completion_tokens=MAX_TOKENS))
    metrics = run_loss(algorithm, episodes, policy_like(episodes, 0.3), batch).metrics
    for key, expected in {
        "ratio/mean": 1.0, "ratio/min": 1.0, "ratio/max": 1.0, "ratio/clip_fraction": 0.0,
        "policy/kl_k1": 0.0, "policy/kl_k2": 0.0, "policy/kl_k3": 0.0,
    }.items():  # fmt: skip
        assert metrics[key].value == expected, key


def test_episodes_are_ordered_whatever_the_order_of_the_completions():
    algorithm = Algorithm.Config(advantage=GroupMean.Config()).build()
    completions = group(1, [0.0, 1.0]) + group(0, [4.0, 2.0])
    episodes = algorithm.make_episodes([prompt(0), prompt(1)], completions[::-1], max_completion_tokens=8)
    assert [(e.prompt_idx, e.sample_idx, e.advantage) for e in episodes] == [
        (0, 0, 1),
        (0, 1, -1),
        (1, 0, -0.5),
        (1, 1, 0.5),
    ]
    assert [e.group_size for e in episodes] == [2, 2, 2, 2]


def test_micro_batches_add_up_and_their_metrics_merge_exactly():
    algorithm = Algorithm.Config(aggregation=SeqSumConst.Config()).build()
    episodes = episodes_of(algorithm, group(0, [1.0, 0.0, 0.5]), group(1, [0.0, 2.0]))
    normalizers = algorithm.normalizers(episodes, max_completion_tokens=MAX_TOKENS)
    values = policy_like(episodes, 0.3)
    whole = run_loss(algorithm, episodes, values, pack(episodes, normalizers))
    parts = [
        run_loss(algorithm, episodes, values, pack(episodes, normalizers, order=order, padding=3))
        for order in ([4, 0], [1], [3, 2])
    ]
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), abs=1e-14)
    assert merge([part.metrics for part in parts]) == pytest.approx(merge([whole.metrics]), abs=1e-12)


def test_normalizers_count_only_what_takes_part_in_the_loss():
    algorithm = Algorithm.Config(zero_variance="drop").build()
    episodes = episodes_of(algorithm, group(0, [1.0, 0.0]), group(1, [2.0, 2.0]))
    normalizers = algorithm.normalizers(episodes, max_completion_tokens=9)
    assert (normalizers.num_tokens, normalizers.num_sequences, normalizers.num_groups) == (4, 2, 1)
    assert normalizers.max_completion_tokens == 9
    assert algorithm.usable_groups([group(0, [1.0, 0.0]), group(1, [2.0, 2.0]), group(2, [None, 1.0])]) == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(("choice", "rounds"), [("keep", 0), ("drop", 0), ("refill", 3)])
def test_only_refill_asks_for_fresh_prompts_and_a_stated_number_of_times(choice, rounds):
    assert Algorithm.Config(zero_variance=choice, refill_rounds=3).build().refill_rounds == rounds


def test_a_group_of_one_is_a_configuration_error():
    with pytest.raises(ValueError, match=r"sampling\.n = 1: expected at least 2"):
        Algorithm.Config().build().validate_group_size(1)


@pytest.mark.parametrize(
    ("completions", "message"),
    [
        ([scored(7, 0, 1.0)], "prompt 7, sample 0: there is no prompt with this prompt_idx"),
        ([scored(0, 0, 1.0), scored(0, 0, 0.0)], "two completions with sample_idx 0"),
    ],
)
def test_inconsistent_completions_are_named(completions, message):
    with pytest.raises(ValueError, match=message):
        Algorithm.Config().build().make_episodes([prompt(0)], completions, max_completion_tokens=8)


def test_a_batch_without_loss_tokens_gives_a_finite_loss_connected_to_the_graph():
    algorithm = Algorithm.Config(zero_variance="drop").build()
    episodes = episodes_of(algorithm, group(0, [1.0, 1.0]))
    batch = pack(episodes, algorithm.normalizers(episodes, max_completion_tokens=MAX_TOKENS))
    values = policy_like(episodes)
    loss, metrics = run_loss(algorithm, episodes, values, batch)
    loss.backward()
    assert loss.item() == 0.0
    assert all(torch.equal(value.grad, torch.zeros_like(value)) for value in values)
    assert "ratio/mean" not in metrics
