"""Columns of an episode row, plain cells, and schemas over time."""

import math

import numpy as np
import pytest
import torch

from tests.parts.observability import NASTY, group, rows_of, sample
from torchtitan_rl.observe.sample_rows import plain
from torchtitan_rl.observe.select import Selection, shown
from torchtitan_rl.types import LogprobDiff

SPECIFIED = [
    "step", "episode_id", "policy_version", "staleness", "split", "prompt_idx", "sample_idx", "group_size",
    "select_reason", "prompt", "response", "expected_answer", "answer", "correct", "reward", "advantage", "in_loss",
    "left_out", "prompt_tokens", "response_tokens", "carried_tokens", "finish_reason", "logprob_mean", "logprob_diff_mean", "logprob_diff_max",
]  # fmt: skip


def test_an_episode_row_has_every_specified_column_in_order():
    rows = rows_of(group(0, sample(extra={"note": "n"}), columns={"level": 3}), step=7)
    [row] = shown(Selection(["top"]).select(rows))
    assert list(row) == [*SPECIFIED, "reward/correct", "extra/note", "example/level"]


def test_episode_row_values():
    judged = {"correct": False, "advantage": -1.5, "left_out": "truncated"}
    one = sample(1, 0.5, token_ids=[1, 2, 3, 4], logprob_diff=LogprobDiff(mean=1e-5, max=1e-4), **judged)
    [row] = rows_of(group(2, one), step=7)
    expected = {"step": 7, "episode_id": "train/7/2/1", "policy_version": 3, "staleness": 3, "response_tokens": 4}
    expected |= {"prompt_tokens": 2, "logprob_mean": -0.5, "reward": 0.5, "in_loss": False, "logprob_diff_max": 1e-4}
    assert row == row | expected | judged


def test_environment_tokens_are_counted_separately_and_excluded_from_means():
    mask = [True, False, True]
    [row] = rows_of(group(0, sample(loss_mask=mask, reference_logprobs=np.float32([-1, -9, -3]))))
    assert (row["response_tokens"], row["observed_tokens"], row["reference_logprob_mean"]) == (2, 1, -2.0)


def test_rows_have_the_mass_by_rewards_and_the_share_of_the_update():
    shaped = [(1.0, 3.0), (0.0, 1.0), (0.0, -2.0)]
    members = [sample(i, r, shaped_reward=r, advantage=a) for i, (r, a) in enumerate(shaped)]
    rows = rows_of(group(0, *members, sample(3, None)))
    total = math.e + 1 + 1
    assert [row["q_mass"] for row in rows] == pytest.approx([math.e / total, 1 / total, 1 / total, 0.0])
    assert [row["update_mass_proxy"] for row in rows] == pytest.approx([0.75, 0.25, 0.0, 0.0])
    listwise = sample(0, 1.0, shaped_reward=1.0, columns={"q_mass": 0.9, "mass": 1.0})
    [row] = rows_of(group(0, listwise))
    assert (row["q_mass"], row["update_mass_proxy"]) == (0.9, 1.0)
    for row in (*rows_of(group(0, sample(0, None))), *rows_of(group(0, sample(0, 1.0)), split="eval_greedy")):
        assert not {"q_mass", "update_mass_proxy"} & row.keys()


def test_a_reward_function_or_an_example_s_column_named_like_a_core_column_cannot_overwrite_it():
    one = sample(0, 0.5, breakdown={"reward": 9.0, "prompt": 8.0}, extra={"response": "fake"})
    [row] = rows_of(group(0, one, columns={"reward": 7.0}))
    assert (row["reward"], row["response"]) == (0.5, "[ANSWER]")
    assert (row["reward/reward"], row["reward/prompt"], row["extra/response"]) == (9.0, 8.0, "fake")
    assert row["example/reward"] == 7.0


def test_cells_are_converted_to_plain_values():
    cells = [torch.tensor(2.5), np.int64(3), np.str_("a"), 2**70, {1: (1, 2)}, NASTY, None, True, torch.ones(2)]
    expected = [2.5, 3, "a", str(2**70), {"1": [1, 2]}, NASTY, None, True, [1.0, 1.0]]
    assert [plain(cell) for cell in cells] == expected
    assert [type(plain(cell)) for cell in cells] == [type(cell) for cell in expected]
