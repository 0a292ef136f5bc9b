"""Reward functions that raise, return something wrong, hang or exit: what becomes of the reward and of the run."""

import logging
import time

import pytest

from tests.parts.grading import constant, drained, grader, rewards, score
from torchtitan_rl.rewards import RewardError


def raises(completions, **_):
    raise KeyError("boom")


def too_few(completions, **_):
    return [1.0]


async def has_a_limit_of_its_own(completions, **_):
    raise TimeoutError("no answer from the judge")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (raises, "boom"),
        (has_a_limit_of_its_own, "no answer from the judge"),
        (too_few, "returned 1 values for 2 completions"),
        (constant(float("nan")), "returned nan for completion 0"),
        (constant(1e308), "returned 1e.308 for completion 0"),
    ],
)
def test_failing_function_is_handled_by_each_failure_policy(function, said, caplog):
    with pytest.raises(RewardError, match=f"{function.__name__}.*What is 12.*{said}.*grader.on_failure_of"):
        score(grader(function), "a", "b")

    tolerant = grader(function, constant(1.0, "other"), on_failure="none")
    with caplog.at_level(logging.WARNING):
        scored = score(tolerant, "a", "b")
        score(tolerant, "c", "d")
    assert rewards(scored) == [None, None]
    assert scored[1].reward_breakdown == {function.__name__: None, "other": 1.0}
    assert function.__name__ in "".join(scored[0].extra)
    assert len(scored[0].extra) == 1
    assert drained(tolerant)[f"reward/{function.__name__}/failures"] == (4.0, "sum", 1.0)
    assert len([r for r in caplog.records if "Such completions get no reward" in r.message]) == 1


def test_failure_policy_of_a_function_overrides_the_general_one():
    assert rewards(score(grader(raises, on_failure_of={"raises": "none"}), "a")) == [None]


def sleeps(completions, **_):
    time.sleep(30)


async def sleeps_async(completions, **_):
    import asyncio

    await asyncio.sleep(30)


@pytest.mark.parametrize("function", [sleeps, sleeps_async])
def test_hanging_function_times_out(function):
    start = time.monotonic()
    tolerant = grader(function, on_failure="none", time_limit_seconds=0.2)
    scored = score(tolerant, "a", "b")
    assert rewards(scored) == [None, None]
    assert "longer than 0.2 s" in scored[0].extra[f"error/{function.__name__}"]
    with pytest.raises(RewardError, match="longer than 0.1 s.*Make it faster, raise grader.time_limit_seconds_of, or"):
        score(grader(function, time_limit_seconds_of={function.__name__: 0.1}), "a")
    assert time.monotonic() - start < 15


class WithoutWords(Exception):
    def __str__(self):
        raise ValueError("there are none")


def test_exception_that_cannot_be_shown_is_a_failure_like_any_other(build):
    def fails(completions, **_):
        raise WithoutWords

    [sample] = score(build(fails, in_process=["fails"], on_failure="none"), "a")
    assert sample.reward is None
    assert "WithoutWords" in sample.extra["error/fails"]
