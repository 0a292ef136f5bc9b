"""log_extra and log_metric: what reward functions may log, and that it never decides about training."""

import json
import logging
from bdb import BdbQuit

import pytest

from tests.parts.grading import grader, logged, rewards, score


def test_logged_columns_stay_with_their_completions():
    def counts(completions, log_extra, **_):
        log_extra("characters", [len(text) for text in completions])
        return [0.0] * len(completions)

    scored = score(grader(counts), "ab", "c")
    assert [s.extra for s in scored] == [{"counts/characters": 2}, {"counts/characters": 1}]


def test_logged_metrics_are_returned_as_mean_and_count():
    def accurate(completions, log_metric, **_):
        for text in completions:
            log_metric("accuracy", float(text == "right"))
        return [0.0] * len(completions)

    graded = grader(accurate)
    score(graded, "right", "right", "right")
    score(graded, "wrong")
    assert logged(graded) == {"extra/accurate/accuracy": (0.75, "mean", 4)}
    assert logged(graded) == {}


@pytest.mark.parametrize("number", [1, 3])
def test_column_of_wrong_length_is_dropped_without_calling_the_function_again(caplog, number):
    calls = []

    def careless(completions, log_extra, log_metric, **_):
        calls.append(1)
        log_metric("calls", 1.0)
        log_extra("good", ["x"] * len(completions))
        for _place in range(number):
            log_extra("bad", ["x"])
        return [1.0] * len(completions)

    graded = grader(careless, in_process=["careless"])
    with caplog.at_level(logging.WARNING):
        scored = score(graded, "a", "b")
    assert rewards(scored) == [1.0, 1.0]
    assert scored[0].extra == {"careless/good": "x"}
    assert logged(graded) == {"extra/careless/calls": (1.0, "mean", 2)}
    assert len(calls) == 1
    assert f"'careless' called log_extra('bad', ...) with {number} values for 2 completions" in caplog.text


@pytest.mark.parametrize("bad", ["xy", 7, None])
def test_invalid_logging_loses_the_extras_and_keeps_the_scores(bad, caplog):
    def careless(completions, log_extra, log_metric, **_):
        log_metric("calls", 1.0)
        log_extra("good", ["x"] * len(completions))
        log_extra("bad", bad)
        return [float(len(text)) for text in completions]

    graded = grader(careless)
    with caplog.at_level(logging.WARNING):
        scored = score(graded, "ab", "c")
    assert rewards(scored) == [2.0, 1.0]
    assert scored[0].extra == {}
    assert logged(graded) == {}
    assert "'careless' called log_extra('bad'" in caplog.text


def test_logged_metric_is_weighted_by_group_size():
    def share(completions, log_metric, **_):
        log_metric("right", sum(text == "right" for text in completions) / len(completions))
        return [0.0] * len(completions)

    graded = grader(share)
    score(graded, "right", "right", "right", "wrong")
    score(graded, "wrong", "wrong")
    assert logged(graded) == {"extra/share/right": (0.5, "mean", 6)}


def test_non_finite_metrics_are_counted_and_kept_out_of_the_mean():
    def shaky(completions, log_metric, **_):
        for value in (1.0, float("nan"), 3.0, float("inf")):
            log_metric("value", value)
        return [0.0] * len(completions)

    graded = grader(shaky)
    score(graded, "a")
    assert logged(graded) == {
        "extra/shaky/value": (2.0, "mean", 0.5),  # two of four values, of one completion
        "extra/shaky/value/non_finite": (2.0, "sum", 1.0),
    }


def test_a_breakpoint_is_said_with_the_users_line():
    def stops(completions, **_):
        raise BdbQuit  # as breakpoint() does where no terminal is

    [failed] = score(grader(stops, on_failure="none"), "a")
    assert "breakpoint() needs a terminal, and there is none (" in failed.extra["error/stops"]
    parsed = score(grader(lambda completions: [json.loads(c) for c in completions], on_failure="none"), "{")
    assert "test_reward_log.py, line" in str(parsed[0].extra)  # and not a line of json's
