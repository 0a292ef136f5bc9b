"""The metric set: closed-form values, absent keys, merges, and its page in the docs."""

import re
from itertools import combinations
from pathlib import Path

import pytest

from tests.unit_tests.observability.observability_parts import episode
from torchtitan_rl.observability import (
    completion_metrics,
    diversity_metrics,
    evaluation_metrics,
    optimizer_metrics,
    perf_metrics,
    record_metrics,
    time_metrics,
)

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def values(metrics):
    return {key: float(metric.value) for key, metric in metrics.items()}


def test_completion_lengths_of_all_and_of_those_that_terminated():
    lengths = [(2, "stop"), (4, "stop"), (9, "length")]
    episodes = [episode(0, i, token_ids=[1] * n, finish_reason=reason) for i, (n, reason) in enumerate(lengths)]
    found = values(completion_metrics(episodes))
    assert (found["completions/length/mean"], found["completions/length/min"], found["completions/length/max"]) == (
        5,
        2,
        9,
    )
    assert found["completions/terminated_length/mean"] == 3
    assert found["completions/terminated_length/max"] == 4
    assert found["completions/clipped_fraction"] == pytest.approx(1 / 3)
    assert found["completions/finish_reason/stop"] == pytest.approx(2 / 3)
    assert found["completions/finish_reason/length"] == pytest.approx(1 / 3)
    assert (found["completions/tokens"], found["completions/prompt_tokens"], found["completions/count"]) == (15, 6, 3)


def test_terminated_lengths_are_absent_when_none_terminated_and_all_keys_without_episodes():
    found = completion_metrics([episode(finish_reason="length")])
    assert not any("terminated" in key for key in found)
    assert completion_metrics([]) == diversity_metrics([]) == evaluation_metrics([]) == {}


def test_distinct_n_does_not_cross_completion_boundaries():
    group = [episode(0, 0, token_ids=[1, 2]), episode(0, 1, token_ids=[3, 1, 2])]
    found = values(diversity_metrics(group))
    assert found["diversity/distinct_1/macro"] == 3 / 5
    assert found["diversity/distinct_2/macro"] == 2 / 3


def test_diversity_macro_is_the_mean_over_groups_and_micro_over_their_n_grams():
    episodes = [
        episode(0, 0, token_ids=[1, 1, 1, 1]),
        episode(0, 1, token_ids=[1, 1]),
        episode(1, 0, token_ids=[1]),
        episode(1, 1, token_ids=[2]),
    ]
    found = values(diversity_metrics(episodes))
    assert found["diversity/distinct_1/macro"] == pytest.approx((1 / 6 + 1) / 2)
    assert found["diversity/distinct_1/micro"] == pytest.approx(3 / 8)
    assert found["diversity/distinct_2/macro"] == pytest.approx(1 / 4)
    assert found["diversity/jaccard_distance/macro"] == pytest.approx((0 + 1) / 2)
    assert found["diversity/groups"] == 2


def test_mean_pairwise_jaccard_distance_equals_its_definition():
    completions = [[1, 2, 3, 3], [2, 3, 4], [9], [1, 2, 3], []]
    group = [episode(0, i, token_ids=tokens) for i, tokens in enumerate(completions)]
    pairs = list(combinations([set(tokens) for tokens in completions if tokens], 2))
    expected = sum(1 - len(a & b) / len(a | b) for a, b in pairs) / len(pairs)
    assert values(diversity_metrics(group))["diversity/jaccard_distance/micro"] == pytest.approx(expected, abs=1e-6)


def test_large_token_ids_make_no_false_bigrams():
    group = [episode(0, 0, token_ids=[2**17, 0, 1, 2**17 - 1])]
    assert values(diversity_metrics(group))["diversity/distinct_2/micro"] == 1.0


def test_diversity_takes_whole_groups_until_its_token_budget():
    episodes = [episode(p, s, token_ids=[1, 2, 3]) for p in range(5) for s in range(2)]
    assert values(diversity_metrics(episodes, max_tokens=7))["diversity/groups"] == 2
    assert values(diversity_metrics(episodes, max_tokens=1))["diversity/groups"] == 1


def test_evaluation_accuracy_mean_and_unbiased_pass_at_k():
    right = {0: [1, 0, 0, 0], 1: [1, 1, 0, 0], 2: [0, 0, 0, 0]}
    episodes = [
        episode(p, s, float(hit), answer=str(p + 1) if hit else None)
        for p, hits in right.items()
        for s, hit in enumerate(hits)
    ]
    found = values(evaluation_metrics(episodes))
    assert found["evaluation/accuracy"] == pytest.approx(3 / 12)
    assert found["evaluation/mean@4"] == pytest.approx((1 / 4 + 2 / 4 + 0) / 3)
    drawn = {p: list(combinations(hits, 2)) for p, hits in right.items()}
    by_counting = sum(sum(any(pair) for pair in pairs) / len(pairs) for pairs in drawn.values()) / 3
    assert found["evaluation/pass@2"] == pytest.approx(by_counting)
    assert found["evaluation/pass@4"] == pytest.approx(2 / 3)
    assert "evaluation/pass@1" not in found
    assert found["evaluation/format_rate"] == pytest.approx(3 / 12)
    assert found["evaluation/reward"] == pytest.approx(3 / 12)
    assert found["evaluation/length"] == 3


def test_greedy_evaluation_has_accuracy_alone_and_a_prefix_tells_evaluations_apart():
    found = evaluation_metrics([episode(0, 0), episode(1, 0, None, answer=" 2 ")], prefix="evaluation/greedy")
    assert values(found)["evaluation/greedy/accuracy"] == 1.0
    assert not any("@" in key for key in found)
    assert found["evaluation/greedy/reward"].weight == 1


def test_pass_at_the_largest_n_that_is_no_power_of_two_is_there():
    found = evaluation_metrics([episode(0, s) for s in range(6)])
    assert {key for key in found if "pass@" in key} == {"evaluation/pass@2", "evaluation/pass@4", "evaluation/pass@6"}


def test_optimizer_time_and_perf_by_their_formulas():
    found = values(optimizer_metrics(grad_norm=0.5, learning_rate=1e-5, optimizer_step=7, tokens_seen=100))
    assert found == {
        "optimizer/grad_norm": 0.5,
        "optimizer/learning_rate": 1e-5,
        "optimizer/step": 7,
        "optimizer/tokens_seen": 100,
    }
    found = values(
        time_metrics({"generate": 6.0, "update": 3.0, "update/forward": 1.0}, step_seconds=10.0, sync_bytes=8)
    )
    assert found["time/unaccounted"] == 1.0
    assert found["sync/bytes"] == 8
    found = values(
        perf_metrics(
            generated_tokens=1000, trained_tokens=1200, generate_seconds=2.0, update_seconds=3.0, step_seconds=5.0,
            flops_per_token=10.0, peak_flops=40_000.0, decode_bound_tokens_per_s=2000.0, padding_tokens=300,
            rank_tokens=[500, 700], peak_memory_bytes=3 * 2**30,
        )
    )  # fmt: skip
    assert found["perf/generated_tokens_per_s"] == 500
    assert found["perf/trained_tokens_per_s"] == 400
    assert found["perf/step_tokens_per_s"] == 200
    assert found["perf/mfu"] == pytest.approx(0.1)
    assert found["perf/decode_bound_fraction"] == 0.25
    assert found["perf/padding_fraction"] == 0.2
    assert found["perf/rank_imbalance"] == pytest.approx(700 / 600 - 1)
    assert found["perf/peak_memory_gib"] == 3


def test_perf_leaves_out_what_is_not_known():
    found = perf_metrics(
        generated_tokens=0, trained_tokens=0, generate_seconds=0.0, update_seconds=0.0, step_seconds=1.0
    )
    assert set(found) == {"perf/step_tokens_per_s"}


def test_metrics_of_parts_of_a_step_merge_to_those_of_the_whole(ranks):
    episodes = [
        episode(p, s, float(s), token_ids=[1] * (1 + p + s), finish_reason="stop" if s else "length")
        for p in range(4)
        for s in range(3)
    ]
    world = ranks(2)
    from torchtitan_rl.observability import collector

    for rank, part in ((0, episodes[:3]), (1, episodes[3:])):
        collector.activate(world.recorders[rank]._collector)
        record_metrics({**completion_metrics(part), **evaluation_metrics(part), **diversity_metrics(part)})
    merged = world.flush(1)
    whole = {**completion_metrics(episodes), **evaluation_metrics(episodes), **diversity_metrics(episodes)}
    for key, metric in whole.items():
        assert merged[key] == pytest.approx(metric.value), key


def test_every_key_is_in_docs_metrics_md():
    group = [episode(0, s, finish_reason="length" if s else "stop") for s in range(4)]
    metrics = {
        **completion_metrics(group),
        **diversity_metrics(group),
        **evaluation_metrics(group),
        **optimizer_metrics(grad_norm=1, learning_rate=1, optimizer_step=1, epoch=1, prompts_seen=1, tokens_seen=1),
        **time_metrics({}, step_seconds=1, sync_bytes=1),
        **perf_metrics(
            generated_tokens=1, trained_tokens=1, generate_seconds=1, update_seconds=1, step_seconds=1,
            flops_per_token=1, peak_flops=1, decode_bound_tokens_per_s=1, padding_tokens=1, rank_tokens=[1],
            peak_memory_bytes=1,
        ),
    }  # fmt: skip
    rows = re.findall(r"^\| `([^`]+)` \|[^|]+\|[^|]+\| (\w+) \|", PAGE.read_text(), re.MULTILINE)
    documented = dict(rows)
    for key, metric in metrics.items():
        key = re.sub(r"@\d+$", "@k", key)
        key = re.sub(r"finish_reason/\w+", "finish_reason/<reason>", key)
        assert documented.get(key) == metric.reduction, key
