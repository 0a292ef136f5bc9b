"""The samples of a step that fails: the newest of what is known of them, once, in no metric."""

import pytest

from tests.parts.observability import group, sample
from torchtitan_rl.observe import read_rows
from torchtitan_rl.observe.unfinished import UnfinishedStep
from torchtitan_rl.types import Group, LogprobDiff


def decode(ids):
    return " ".join(map(str, ids))


def only(part: str, *groups: Group) -> list[Group]:
    """The groups with the "completion" or the "scored" of each episode."""
    return [Group(prompt=g.prompt, samples=[getattr(episode, part) for episode in g.samples]) for g in groups]


@pytest.fixture
def full():
    return group(0, sample(0, 1.0, advantage=0.5), sample(1, 0.0, advantage=-0.5, left_out="truncated"))


def test_the_newest_state_of_each_group_is_written_and_marked(recorder, tmp_path, full):
    step = UnfinishedStep()
    other = group(1, sample(0, 2.0), sample(1, 2.0))
    third = group(2, sample(0, 3.0, advantage=0.7))
    for groups in (only("completion", full, other, third), only("scored", other, third), [third]):
        step.keep(groups, step=4, split="train")
    step.keep(only("completion", full), step=4, split="eval_greedy")
    run = recorder(decode=decode)
    run.write_unfinished(step)
    run.close()
    rows = {row["episode_id"]: row for row in read_rows(tmp_path)}
    assert len(rows) == 7
    assert all(row["unfinished"] is True and row["in_loss"] is False and row["run_id"] for row in rows.values())
    assert [rows[f"train/4/{p}/0"]["reward"] for p in range(3)] == [None, 2.0, 3.0]
    assert [rows[f"train/4/{p}/0"]["advantage"] for p in range(3)] == [None, None, 0.7]
    assert rows["eval_greedy/4/0/1"]["table"] == "evaluation/samples"
    assert rows["train/4/2/0"]["left_out"] == "its step failed"
    assert rows["train/4/2/0"]["tokens"]["advantage"] == 0.7
    assert not any("advantage" in rows[f"train/4/{p}/{s}"]["tokens"] for p in range(2) for s in range(2))


def test_a_whole_step_leaves_nothing_and_the_first_rank_that_fails_writes(recorder, tmp_path, full):
    done, first, second = UnfinishedStep(), UnfinishedStep(), UnfinishedStep()
    done.keep([full], step=4, split="train")
    done.forget("train")
    run = recorder(decode=decode)
    run.write_unfinished(done)
    assert not (tmp_path / "samples.unfinished.jsonl").exists()
    first.keep([full], step=5, split="train")
    second.keep([group(7, sample(0))], step=5, split="train")
    run.write_unfinished(first)
    run.write_unfinished(second)
    run.close()
    assert {row["prompt_idx"] for row in read_rows(tmp_path)} == {0}
    assert sorted(path.name for path in tmp_path.glob(".*")) == []


@pytest.mark.parametrize(
    ("settings", "tables", "count"),
    [
        ({"leave_out_columns": ["messages", "expected_*"]}, {"rollout/samples", "evaluation/samples"}, 4),
        ({"filters": ["local=!rollout/*"]}, {"evaluation/samples"}, 2),
        ({"store_bytes": 10}, {"evaluation/samples"}, 1),
        ({"filters": ["local=*:10"]}, {"rollout/samples", "evaluation/samples"}, 4),  # a failed step is not thinned
    ],
)
def test_the_store_s_settings_hold_for_a_failed_step(recorder, tmp_path, full, settings, tables, count):
    step = UnfinishedStep()
    step.keep([full], step=3, split="train")
    step.keep([full], step=3, split="eval_greedy")
    run = recorder(decode=decode, **settings)
    run.write_unfinished(step)
    run.close()
    rows = list(read_rows(tmp_path))
    assert ({row["table"] for row in rows}, len(rows)) == (tables, count)
    assert all(("expected_answer" in row) is ("leave_out_columns" not in settings) for row in rows)


def test_columns_left_out_are_not_those_that_say_which_step_failed(recorder, tmp_path, full):
    step = UnfinishedStep()
    step.keep([full], step=3, split="train")
    run = recorder(decode=decode, leave_out_columns=["t*", "s*", "u*"])
    run.write_unfinished(step)
    run.close()
    rows = list(read_rows(tmp_path))
    assert [(row["table"], row["step"], row["unfinished"]) for row in rows] == [("rollout/samples", 3, True)] * 2
    assert not any({"tokens", "split"} & row.keys() for row in rows)


def test_special_tokens_inside_a_sample_of_a_failed_step_are_visible(recorder, tmp_path):
    step = UnfinishedStep()
    step.keep([group(0, sample(0, token_ids=(5, 9, 6), text="5 6"))], step=3, split="train")
    run = recorder(decode=decode)
    run.write_unfinished(step)
    run.close()
    assert [row["response"] for row in read_rows(tmp_path)] == ["5 9 6"]


def test_samples_too_long_for_tokens_leave_them_to_others(recorder, tmp_path):
    lengths = (30_000, 9_000, 9_000, 8_000, 8_000, 8_000, 3)  # the longest differ most
    members = [
        sample(i, token_ids=[5] * n, logprob_diff=LogprobDiff(mean=0.0, max=1.0 / (1 + i)))
        for i, n in enumerate(lengths)
    ]
    step = UnfinishedStep()
    step.keep([group(0, *members)], step=3, split="train")
    run = recorder(decode=decode)
    run.write_unfinished(step)
    run.close()
    assert ["tokens" in row for row in read_rows(tmp_path)] == [False, False, False, True, True, False, True]
