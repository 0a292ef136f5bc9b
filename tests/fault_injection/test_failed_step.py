"""A step that fails keeps its samples for people to read, and a resumed run takes that step again."""

import json
from pathlib import Path

import pytest

from tests.fault_injection.harness import train
from torchtitan_rl.observe import read_rows

REWARD = ["--grader.rewards", "tests/fault_injection/rewards.py:raises"]
RAISES = ["--num-steps", "3", "--checkpoint.interval", "1", *REWARD]
HEALTHY = {"BAD_RANK": "none"}


def stored(folder: Path) -> str:
    """samples.jsonl without the run's random id."""
    return (folder / "run" / "samples.jsonl").read_text().replace((folder / "run" / "run_id").read_text(), "id")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reward_that_raises_leaves_the_samples_of_its_step_and_a_resumed_run_has_none_twice(tmp_path, ranks):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    assert train(whole, *RAISES, ranks=ranks, **HEALTHY).code == 0
    assert train(broken, *RAISES, ranks=ranks, BAD_RANK=str(ranks - 1)).code != 0
    kept = [row for row in read_rows(broken / "run") if row.get("unfinished")]
    assert len(kept) == 16 // ranks  # of the replica whose reward failed
    assert {row["step"] for row in kept} == {2}
    assert all(row["response"] and row["reward"] is None and row["left_out"] == "its step failed" for row in kept)
    assert any("tokens" in row for row in kept)
    assert [json.loads(line)["step"] for line in (broken / "run" / "metrics.jsonl").read_text().splitlines()] == [1]
    assert train(broken, *RAISES, ranks=ranks, log="resumed.log", **HEALTHY).code == 0
    assert not any(row.get("unfinished") for row in read_rows(broken / "run"))
    assert stored(broken) == stored(whole)
