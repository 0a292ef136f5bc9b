"""The metric set: closed-form values, absent keys, and its page in the docs."""

import math
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.parts.observability import group, sample
from torchtitan_rl.algorithm import Algorithm
from torchtitan_rl.evaluation import Evaluation
from torchtitan_rl.events import recorded_by
from torchtitan_rl.generator.generator_config import GeneratorConfig
from torchtitan_rl.observe import read_rows
from torchtitan_rl.observe.metrics.completions import completion_metrics, diversity_metrics, staleness_metrics
from torchtitan_rl.observe.metrics.evaluation_stats import evaluation_metrics
from torchtitan_rl.observe.metrics.reward_stats import (
    advantage_metrics,
    group_metrics,
    participation_metrics,
    reward_metrics,
)
from torchtitan_rl.observe.metrics.throughput import (
    SIDES,
    SplitNotice,
    TokenFlops,
    optimizer_metrics,
    perf_metrics,
    time_shares,
)
from torchtitan_rl.observe.observer import RunObserver, record_evaluation
from torchtitan_rl.sampling import SamplingConfig

UPDATE = SimpleNamespace(
    grad_norm=0.5, clipped_fraction=0.25, learning_rate=1e-5, work=((1000, 2000, 1500), (500, 1000, 750)),
    rank_tokens=[500, 700], trained_tokens=1200, forward_only_tokens=0, unscored_tokens=300, packed_tokens=1500,
    padding_tokens=300, metrics=[],
)  # fmt: skip
STATE = SimpleNamespace(step=4, optimizer_steps=7, prompts_seen=9, tokens_seen=100)
SECONDS = {"generate": 2.0, "gather": 0.25, "train": 3.0, "sync": 0.5, "step": 5.0}
ALGORITHM = Algorithm.Config().build(max_completion_tokens=16)
FLOPS = TokenFlops(4.0, 0.5, 2.0, frozen_layers=3.0, frozen_head=1.0)


def values(metrics):
    return {key: float(metric.value) for key, metric in metrics.items()}


def tokens(*completions, prompt_idx=0):
    """A group whose completions have these tokens."""
    return group(prompt_idx, *(sample(i, token_ids=ids) for i, ids in enumerate(completions)))


def judged(*verdicts, prompt_idx=0, **fields):
    """A group whose completions the task judged so."""
    return group(prompt_idx, *(sample(i, correct=right, **fields) for i, right in enumerate(verdicts)))


def test_reward_metrics_over_rollouts_groups_and_functions():
    groups = [
        group(0, sample(0, 1.0, breakdown={"right": 1.0}), sample(1, 0.0, breakdown={"right": 0.0})),
        group(1, sample(0, 3.0, breakdown={"right": 3.0}), sample(1, None, breakdown={"right": None})),
    ]
    found = values(reward_metrics(groups))
    assert (found["reward/mean"], found["reward/min"], found["reward/max"]) == (pytest.approx(4 / 3), 0.0, 3.0)
    assert found["reward/std"] == pytest.approx((14 / 9) ** 0.5)
    assert found["reward/group_std"] == (0.5 + 0.0) / 2
    assert (found["reward/right/mean"], found["reward/right/std"]) == (found["reward/mean"], found["reward/std"])
    assert "reward/shaped_mean" not in found


def test_correctness_metrics_use_the_task_and_not_the_reward_sign():
    bonus = {"reward": 0.2}
    groups = [judged(True, True), judged(False, False, **bonus), judged(True, False, **bonus), judged(False, None)]
    found = values(group_metrics(groups, ALGORITHM))
    assert [found[f"groups/{kind}_fraction"] for kind in ("all_right", "all_wrong", "mixed")] == [0.25, 0.5, 0.25]
    assert found["train/accuracy"] == 3 / 7


def test_correctness_metrics_are_absent_without_a_judgement():
    assert set(group_metrics([judged(None, None)], ALGORITHM)) == {"groups/zero_variance_fraction"}
    assert not any("right" in key or "wrong" in key for key in completion_metrics([judged(None)]))
    assert not any("accuracy" in key or "@" in key for key in evaluation_metrics([judged(None, None)]))


def test_zero_variance_is_computed_from_rewards():
    pairs = group(0, sample(0, 1.0), sample(1, 1.0)), group(1, sample(0, 1.0), sample(1, 0.0))
    groups = [*pairs, group(2, sample(0, None))]
    assert values(group_metrics(groups, ALGORITHM))["groups/zero_variance_fraction"] == 0.5
    rounding = [group(0, sample(0, (0.1 + 0.2) + 0.3), sample(1, (0.3 + 0.2) + 0.1))]
    assert values(group_metrics(rounding, ALGORITHM))["groups/zero_variance_fraction"] == 1.0


def test_masses_of_an_update_are_the_positive_advantages_of_completions_in_the_loss():
    groups = [
        group(
            0,
            sample(0, 1.0, advantage=0.5, correct=True),
            sample(1, 0.9, advantage=1.5, correct=False),
            sample(2, 0.0, advantage=-3.0, correct=False),
            sample(3, 1.0, advantage=1.0, correct=False, left_out="truncated"),
        ),
        group(1, sample(0, 0.0, advantage=2.0), sample(1, -1.0, advantage=-2.0)),  # not judged: reward 0 is wrong
        group(2, sample(0, 0.0), sample(1, 0.0)),  # no update
    ]
    found = values(advantage_metrics(groups))
    # (1/4, 3/4), of which 3/4 is wrong, and (1), which is wrong
    effective = math.exp(-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)))
    assert found["groups/effective_rollouts"] == pytest.approx((effective + 1) / 2)
    assert found["groups/incorrect_mass"] == pytest.approx((0.75 + 1) / 2)
    assert not [key for key in advantage_metrics(groups[2:]) if key.startswith("groups/")]


def test_an_update_without_rewards_has_no_wrong_rollouts():
    """As with a loss of one's own that learns from samples and gives tokens their advantages."""
    taught = group(0, sample(0, None, advantage=0.5), sample(1, None, advantage=-0.5))
    found = values(advantage_metrics([taught]))
    assert (found["groups/effective_rollouts"], found["groups/incorrect_mass"]) == (1.0, 0.0)


def test_entropy_bonus_metrics_are_the_bonus_and_its_scale():
    bonuses = {"columns": {"entropy_bonus": 0.5}}, {"columns": {"entropy_bonus": -0.1}}
    groups = [group(0, sample(0, shaped_reward=1.0, **bonuses[0]), sample(1, shaped_reward=-0.5, **bonuses[1]))]
    found = values(reward_metrics(groups))
    expected = {"mean": 0.2, "std": 0.3, "reward_std": 0.75}
    bonus = {key.partition("/")[2]: value for key, value in found.items() if key.startswith("entropy_bonus/")}
    assert bonus == pytest.approx(expected)
    assert not [key for key in reward_metrics([judged(True)]) if "bonus" in key]


def test_advantage_metrics_cover_completions_in_the_loss():
    groups = [
        group(0, sample(advantage=1.0), sample(1, advantage=-3.0), sample(2, advantage=9.0, left_out="no reward"))
    ]
    found = values(advantage_metrics(groups) | participation_metrics(groups))
    assert (found["advantage/mean"], found["advantage/positive_fraction"]) == (-1.0, 0.5)
    assert found["loss/completion_fraction"] == pytest.approx(2 / 3)
    assert found["loss/left_out/no_reward"] == pytest.approx(1 / 3)
    assert advantage_metrics([]) == participation_metrics([]) == {}


def test_length_metrics_of_all_terminated_right_and_wrong_completions():
    ends = [(2, "stop", True), (4, "stop", False), (9, "length", False)]
    members = [sample(i, token_ids=[1] * n, finish_reason=end, correct=right) for i, (n, end, right) in enumerate(ends)]
    found = values(completion_metrics([group(0, *members)]))
    expected = {"length/mean": 5, "length/min": 2, "length/max": 9, "right_length/mean": 2, "wrong_length/mean": 6.5}
    expected |= {"terminated_length/mean": 3, "terminated_length/min": 2, "terminated_length/max": 4}
    expected |= {"tokens": 15, "prompt_tokens": 6, "count": 3, "clipped_fraction": 1 / 3}
    expected |= {"finish_reason/stop": 2 / 3, "finish_reason/length": 1 / 3}
    assert found == pytest.approx({f"completions/{name}": value for name, value in expected.items()})
    observed = [group(0, sample(token_ids=[1, 2, 3], loss_mask=[True, False, True]))]
    assert values(completion_metrics(observed))["completions/length/mean"] == 2
    assert values(diversity_metrics(observed))["diversity/distinct_1/macro"] == 1.0
    assert values(evaluation_metrics(observed))["evaluation/length"] == 2


def test_staleness_covers_groups_started_in_earlier_steps():
    assert staleness_metrics([group(0, sample(), sample())]) == {}
    carried = group(0, sample(token_versions=[1, 1, 3]), sample(token_versions=[1, 2, 2]))
    found = values(staleness_metrics([carried, group(1, sample())]))
    assert found == {
        "in_flight/age/mean": 1.0,
        "in_flight/age/max": 2.0,
        "in_flight/carried_groups_fraction": 0.5,
        "in_flight/carried_tokens_fraction": 5 / 9,
    }


def test_diversity_macro_is_the_mean_over_groups_and_micro_over_all_of_them():
    found = values(diversity_metrics([tokens([1, 1, 1, 1], [1, 1]), tokens([1], [2], [], prompt_idx=1)]))
    expected = {"distinct_1/macro": (1 / 6 + 1) / 2, "distinct_1/micro": 3 / 8, "distinct_2/macro": 1 / 4}
    expected |= {"distinct_2/micro": 1 / 4, "jaccard_distance/macro": (0 + 1) / 2, "jaccard_distance/micro": 1 / 2}
    assert found == pytest.approx({f"diversity/{name}": value for name, value in expected.items()})
    completions = [[1, 2, 3, 3], [2, 3, 4], [9], [1, 2, 3], []]
    found = values(diversity_metrics([tokens(*completions)]))
    assert found["diversity/jaccard_distance/micro"] == pytest.approx((2 * (1 - 2 / 4) + 0 + 3) / 6)
    assert diversity_metrics([tokens([])]) == {}


def test_evaluation_accuracy_mean_and_unbiased_pass_at_k():
    right = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    groups = [
        group(p, *(sample(s, float(hit), correct=bool(hit), answer="1" if hit else None) for s, hit in enumerate(hits)))
        for p, hits in enumerate(right)
    ]
    found = values(evaluation_metrics(groups))
    assert found["evaluation/accuracy"] == pytest.approx(3 / 12)
    assert found["evaluation/mean@4"] == pytest.approx((1 / 4 + 2 / 4 + 0) / 3)
    by_counting = sum(sum(any(pair) for pair in combinations(hits, 2)) / 6 for hits in right) / 3
    assert found["evaluation/pass@2"] == pytest.approx(by_counting)
    assert found["evaluation/pass@4"] == pytest.approx(2 / 3)
    assert "evaluation/pass@1" not in found
    assert found["evaluation/format_rate"] == found["evaluation/reward"] == pytest.approx(3 / 12)
    assert found["evaluation/length"] == 3
    assert {*found} <= {*Evaluation.Config(sampling=SamplingConfig(n=4)).build().metric_names}


def test_optimizer_and_perf_metrics_follow_their_formulas():
    assert values(optimizer_metrics(UPDATE, STATE)) == {
        "optimizer/grad_norm": 0.5,
        "optimizer/clipped_fraction": 0.25,
        "optimizer/learning_rate": 1e-5,
        "optimizer/step": 7,
        "optimizer/prompts_seen": 9,
        "optimizer/tokens_seen": 100,
    }
    perf = perf_metrics(
        UPDATE, generated_tokens=1000, sampled=True, seconds=SECONDS, token_flops=FLOPS, peak_flops=40_000.0
    )
    assert values(perf) == {
        "perf/generated_tokens_per_s": 500,
        "perf/trained_tokens_per_s": 400,
        "perf/step_tokens_per_s": 200,
        "perf/mfu": pytest.approx((8_000 + 2 * 4_000 - 3 * 500 - 750) / 40_000 / 3),  # less for frozen weights
        "perf/padding_fraction": 0.2,
        "perf/forward_only_fraction": 0,
        "perf/unscored_fraction": 0.2,
        "perf/rank_imbalance": pytest.approx(700 / 600 - 1),
    }


def test_shares_of_a_step_and_of_the_save_before_it_sum_to_1():
    seconds = {"step": 9.0, "checkpoint/save": 1.0, "generate": 4.0, "generate/environments": 1.0, "train": 2.0}
    seconds |= {"reference": 0.5, "gather": 0.5, "sync": 1.0, "evaluate": 0.5, "evaluation/generate": 0.4}
    found = values(time_shares(lambda phase: seconds.get(phase, 0.0)))
    expected = {"generate": 0.4, "grade": 0.0, "train": 0.25, "sync": 0.1, "evaluate": 0.05, "checkpoint": 0.1}
    expected |= {"wait": 0.05, "other": 0.05}
    assert found == pytest.approx({f"share/{part}": share for part, share in expected.items()})
    assert time_shares(lambda phase: 0.0) == {}
    assert time_shares(lambda phase: 3.0 * (phase == "idle_generator") or 1.0)["idle/generator"].value == 1


@pytest.mark.parametrize(
    ("idle", "own", "ranks", "said"),
    [
        ((0.01, 0.6), {"ranks": 4, "ahead": 1}, 8, "generators 60%. generator.ranks 3 would save 20%"),  # 3.96 / 5
        ((0.01, 0.6), {"ranks": 4, "ahead": 1, "tensor_parallel_degree": 4}, 8, None),  # one engine
        ((0.01, 0.1), {"ranks": 4, "ahead": 1}, 8, None),
        ((0.9, 0.1), {"ranks": 4}, 8, "generator.ranks 6 would save 20%"),  # in turns: 0.4 / 2 + 3.6 / 6
        ((0.7, 0.01), {"ranks": 1, "ahead": 1}, 2, None),
    ],
)
def test_split_that_wastes_less_is_named_once_if_whole_engines_can_move(capsys, idle, own, ranks, said):
    notice = SplitNotice(GeneratorConfig(**own), ranks - own["ranks"])
    seconds = {"step": 2.0, "idle_trainer": 2 * idle[0], "idle_generator": 2 * idle[1]}
    shares = time_shares(lambda phase: seconds.get(phase, 0.0))
    assert [shares[f"idle/{side}"].value for side in SIDES] == pytest.approx(idle)
    notice.see(lambda phase: 60.0)  # a first step is unlike others
    for _ in range(30):
        notice.see(lambda phase: seconds.get(phase, 0.0))
    printed = capsys.readouterr().out
    assert printed.count("generator.ranks") == (said is not None)
    assert (said or "") in printed


def a_step():
    """Four groups of three, with everything that a metric is made of."""
    return [
        group(p, *(sample(s, float(s), correct=s > 1, finish_reason="length" if s else "stop", shaped_reward=0.5,
                          left_out=None if s else "truncated", token_ids=[1] * (1 + p + s)) for s in range(3)))
        for p in range(4)
    ]  # fmt: skip


def of_all_ranks(world, monkeypatch, groups):
    """What rank 0's flush returns after every rank recorded the same step."""
    from torchtitan_rl.observe import observer as module

    prompts = SimpleNamespace(metrics=lambda prompts_seen: {})
    for rank, recorder in enumerate(world.recorders):
        monkeypatch.setattr(module, "rank_and_size", lambda rank=rank: (rank, len(world.recorders)))
        monkeypatch.setattr(recorder.collector, "elapsed", lambda phase: SECONDS.get(phase, 0.0))
        parts = {"algorithm": ALGORITHM, "prompts": prompts, "token_flops": FLOPS, "results_folder": Path()}
        with recorded_by(recorder.collector):
            RunObserver(recorder, **parts).step(groups, UPDATE, STATE)
            record_evaluation(groups, SimpleNamespace(prefix="evaluation", split="eval_greedy"), step=STATE.step)
    values = world.flush(STATE.step)
    world.recorders[0].close()
    return {key: value for key, value in values.items() if not key.startswith(("obs/", "perf/peak_memory"))}


@pytest.mark.parametrize("count", [2, 4])
def test_step_metrics_of_several_ranks_equal_those_of_one(ranks, monkeypatch, tmp_path, count):
    groups, found, rows = a_step(), [], []
    for number in (1, count):
        world = ranks(number, folder=tmp_path / str(number), select=["group_best:1", "random:2"])
        found.append(of_all_ranks(world, monkeypatch, groups))
        rows.append([{**row, "run_id": ""} for row in read_rows(tmp_path / str(number))])
    assert found[1] == pytest.approx(found[0])
    assert rows[1] == rows[0]
