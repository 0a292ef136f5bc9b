"""Columns of an episode row, plain cells, and schemas over time."""

import math

import numpy as np
import pytest
import torch

from tests.unit_tests.observability.observability_parts import NASTY, episode
from torchtitan_rl.observability import Reduce, episode_row, episode_rows, record_metric
from torchtitan_rl.observability.rows import EPISODE_COLUMNS, plain, plain_row
from torchtitan_rl.observability.schema import Schema
from torchtitan_rl.observability.table import SelectedTable

SPECIFIED = [
    "step",
    "policy_version",
    "staleness",
    "split",
    "prompt_idx",
    "sample_idx",
    "group_size",
    "rank_in_group",
    "select_reason",
    "prompt",
    "response",
    "expected_answer",
    "reward",
    "score",
    "advantage",
    "weight",
    "prompt_tokens",
    "response_tokens",
    "finish_reason",
    "logprob_mean",
    "logprob_diff_mean",
    "logprob_diff_max",
]


def test_an_episode_row_has_every_specified_column_in_order():
    table = SelectedTable(("top",))
    table.extend(episode_rows([episode(extra={"note": "n"})], step=7, split="train"))
    [row] = table.rows()
    core = [column for column in row if column in SPECIFIED]
    assert core == SPECIFIED
    assert list(row)[-2:] == ["reward/correct", "extra/note"]


def test_an_episode_row_s_values():
    one = episode(2, 1, 0.5, token_ids=[1, 2, 3, 4], advantage=-1.5, weight=0.25, logprob_diff_max=1e-4)
    row = episode_row(one, step=7, split="eval", trainer_version=5)
    assert (row["step"], row["split"], row["policy_version"], row["staleness"]) == (7, "eval", 3, 2)
    assert (row["response_tokens"], row["prompt_tokens"], row["logprob_mean"]) == (4, 2, -0.5)
    assert (row["reward"], row["score"], row["advantage"], row["weight"]) == (0.5, 0.5, -1.5, 0.25)
    assert row["logprob_diff_max"] == 1e-4


def test_lengths_are_true_lengths_and_an_empty_response_has_no_logprob():
    row = episode_row(episode(token_ids=[]), step=1, split="train")
    assert row["response_tokens"] == 0
    assert row["logprob_mean"] is None


def test_rank_in_group_is_by_reward_within_the_prompt_and_none_without_a_reward():
    rewards = [(0, 0, 0.1), (0, 1, 0.9), (0, 2, None), (0, 3, math.nan), (1, 0, 0.5), (0, 4, 0.9)]
    rows = episode_rows([episode(p, s, r) for p, s, r in rewards], step=1, split="train")
    assert [row["rank_in_group"] for row in rows] == [2, 0, None, None, 0, 1]


def test_a_reward_function_named_like_a_core_column_cannot_overwrite_it():
    one = episode(reward=0.5, reward_breakdown={"reward": 9.0, "prompt": 8.0}, extra={"response": "fake"})
    row = episode_row(one, step=1, split="train")
    assert row["reward"] == 0.5
    assert row["response"] == one.response
    assert (row["reward/reward"], row["reward/prompt"], row["extra/response"]) == (9.0, 8.0, "fake")


def test_what_episode_to_dict_returns_becomes_an_episode_row(recorder):
    run = recorder(keep_all_rows=True)
    record_metric("rollout/samples", episode(extra={"a": 1}).to_dict(exclude=["prompt_token_ids"]), Reduce.TABLE)
    table = run._collector.drain()[0].tables["rollout/samples"]
    [row] = table.rows()
    assert row["score"] == 1.0
    assert row["extra/a"] == 1
    assert "token_ids" not in row
    assert "prompt_tokens" not in row


def test_the_value_of_a_table_is_always_a_list_inside(recorder):
    run = recorder()
    record_metric("t", {"score": 1}, Reduce.TABLE)
    record_metric("t", [{"score": 2}, {"score": 3}], Reduce.TABLE)
    assert run._collector.drain()[0].tables["t"].num_rows == 3


def test_rows_without_a_score_come_last_with_one_warning(recorder, caplog):
    run = recorder(select=["top:5", "unscored:5"])
    for step in (1, 2):
        record_metric("t", [{"name": "none"}, {"name": "some", "score": -5}], Reduce.TABLE)
        run.flush(step)
    assert caplog.text.count("are ranked last") == 1
    table = SelectedTable(("top:5", "unscored:5"))
    table.extend([{"name": "none"}, {"name": "some", "score": -5}])
    assert [row["name"] for row in table.rows()] == ["some", "none"]


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (torch.tensor(2.5), 2.5),
        (np.int64(3), 3),
        (np.str_("a"), "a"),
        (2**70, str(2**70)),
        ({1: (1, 2)}, {"1": [1, 2]}),
        (NASTY, NASTY),
        (None, None),
        (True, True),
        (torch.ones(2), [1.0, 1.0]),
    ],
)
def test_cells_are_made_plain(cell, expected):
    assert plain(cell) == expected
    assert type(plain(cell)) in (str, int, float, bool, dict, list, type(None))


def test_a_cell_that_cannot_be_shown_says_so():
    class Hostile:
        def __str__(self):
            raise RuntimeError

    assert plain(Hostile()) == "<Hostile that cannot be shown: RuntimeError>"
    assert plain_row({"a": Hostile()})["a"].startswith("<Hostile")


def test_a_new_column_is_warned_of_once_by_name_and_nothing_is_dropped():
    warned = {}
    schema = Schema(lambda topic, message: warned.setdefault(topic, message))
    assert schema.fit("t", [{"a": 1}], 1) == [{"a": 1}]
    assert warned == {}
    later = [{"a": 2, "b": "new"}]
    assert schema.fit("t", later, 2) == later
    assert schema.fit("t", later, 3) == later
    [message] = warned.values()
    assert "'b'" in message
    assert "step 2" in message


def test_mixed_types_in_a_column_become_text_rather_than_raising():
    warned = {}
    schema = Schema(lambda topic, message: warned.setdefault(topic, message))
    schema.fit("t", [{"a": 1, "b": 1, "n": None}], 1)
    rows = schema.fit("t", [{"a": "x", "b": 2.5, "n": 3}, {"a": 5, "b": None, "n": None}, {"a": [1]}], 2)
    assert [row["a"] for row in rows] == ["x", "5", "[1]"]
    assert [rows[0]["b"], rows[0]["n"], rows[1]["b"]] == [2.5, 3, None]
    assert any("'a' held number, and text from" in message for message in warned.values())


def test_the_known_columns_are_those_the_table_orders():
    assert set(SPECIFIED) <= set(EPISODE_COLUMNS)
