"""Calls that workers begin before the grader is asked for the scores: the same scores, sooner."""

import time

import pytest

from tests.parts.grading import group, groups, logged, rewards
from torchtitan_rl.core.grading import RewardError


def wait_for(path):
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_workers_start_at_once_and_what_runs_here_waits_for_the_score(build, tmp_path):
    def away(completions, **_):
        with (tmp_path / "begun").open("a") as file:
            file.write("once")
        return [1.0]

    def here(completions, **_):
        called.append(completions)
        return [2.0]

    async def together(completions, **_):
        called.append(completions)
        return [4.0]

    called, [one] = [], groups(1)
    graded = build(away, here, together, workers=1, in_process=["here"])
    graded.begin(one)
    wait_for(tmp_path / "begun")
    assert not called
    assert rewards(graded.score([one])[0].samples) == [7.0]
    assert (tmp_path / "begun").read_text() == "once"


def later_the_earlier(completions, log_extra, log_metric, **_):
    number = int(completions[0])
    time.sleep(0.3 - 0.1 * number)
    log_extra("number", [number])
    log_metric("number", number)
    return [float("nan") if number == 1 else float(number)]


def test_what_was_begun_in_any_order_scores_as_if_it_had_not_been(build):
    found = []
    for begun in (False, True):
        graded, asked = build(later_the_earlier, workers=3, on_failure="none"), [*groups(3), group(prompt_idx=3)]
        if begun:
            for one in reversed(asked):
                graded.begin(one)
        scored = graded.score(asked)
        found.append(([(s.reward, s.reward_breakdown, s.extra) for g in scored for s in g.samples], logged(graded)))
    assert found[0] == found[1]
    assert [reward for reward, _, _ in found[1][0]] == [0.0, None, 2.0]


def test_the_first_group_that_failed_is_named_not_the_first_to_fail(build):
    def fails(completions, **_):
        time.sleep(0.3 - 0.1 * int(completions[0]))
        raise ValueError(f"of {completions[0]}")

    graded, asked = build(fails, workers=3), groups(3)
    for one in asked:
        graded.begin(one)
    with pytest.raises(RewardError, match="'fails'.*ValueError: of 0"):
        graded.score(asked)


def test_no_worker_starts_on_what_nobody_will_collect(build, tmp_path):
    """As after a sampling that failed."""

    def slow(completions, **_):
        (tmp_path / completions[0]).touch()
        time.sleep(0.5)
        return [1.0]

    graded = build(slow, workers=1)
    for one in groups(3):
        graded.begin(one)
    wait_for(tmp_path / "0")
    assert rewards(graded.score([group("other")])[0].samples) == [1.0]
    assert {path.name for path in tmp_path.iterdir()} == {"0", "other"}
