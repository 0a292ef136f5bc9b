"""log_extra and log_metric: what reward functions may log, and that it never decides about training."""

import asyncio
import logging
import threading

import pytest
import torch

from tests.parts.grading import TaskOf, build_grader, grader, logged, rewards, score
from torchtitan_rl.observe import Recorder, Reduce, read_rows, record_metric
from torchtitan_rl.rewards import Grader


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


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda log_extra, _: log_extra("bad", ["x"]), "log_extra('bad', ...): 1 values for 2 completions"),
        (lambda log_extra, _: [log_extra("bad", [i]) for i in range(3)], "log_extra('bad', ...): 3 values for 2"),
        (lambda log_extra, _: log_extra("bad", 7), "log_extra('bad', ...): "),
        (lambda log_extra, _: log_extra("bad", [threading.Lock()] * 2), "log_extra('bad', ...): "),
        (lambda _, log_metric: log_metric("bad", "many"), "log_metric('bad', ...): "),
    ],
)
def test_a_wrong_value_is_dropped_alone_and_the_scores_stay(call, reason, caplog):
    calls = []

    def careless(completions, log_extra, log_metric, **_):
        calls.append(1)
        log_metric("calls", 1.0)
        log_extra("good", ["x"] * len(completions))
        call(log_extra, log_metric)
        return [float(len(text)) for text in completions]

    graded = grader(careless, in_process=["careless"])
    with caplog.at_level(logging.WARNING):
        scored = score(graded, "ab", "c")
    assert rewards(scored) == [2.0, 1.0]
    assert scored[0].extra == {"careless/good": "x"}
    assert logged(graded) == {"extra/careless/calls": (1.0, "mean", 2)}
    assert len(calls) == 1
    assert f"'careless' called {reason}" in caplog.text


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


def records(completions, **_):
    """Records 1.0 and 2.0, or 6.0 for a completion "b", with each reduction, a row, and one value in a thread."""
    row = {"text": completions[0], "score": 1}
    record_metric("mine/table", row, Reduce.TABLE)
    row["text"] = "changed later"
    for value in (1.0, 2.0) if completions[0] == "a" else (6.0,):
        for reduction in Reduce:
            if reduction is not Reduce.TABLE:
                record_metric(f"mine/{reduction}", torch.tensor(value), reduction)
    thread = threading.Thread(target=record_metric, args=("mine/of_threads", 1, "sum"))
    thread.start()
    thread.join()
    record_metric("mine/lock", threading.Lock())  # neither a number nor something that can leave a process
    return [0.0] * len(completions)


async def awaits(completions, **_):
    await asyncio.sleep(0)
    return records(completions)


@pytest.mark.parametrize("prefix", ["", "evaluation/"])
@pytest.mark.parametrize(("function", "config"), [(records, {}), (records, {"in_process": ["records"]}), (awaits, {})])
def test_metrics_and_rows_that_a_function_records_reach_the_ranks_recorder_once(function, config, prefix, tmp_path):
    recorder = Recorder(
        Recorder.Config(sinks=["jsonl"], keep_all_rows=True),
        run_folder=tmp_path, run_name="run", run_config={}, total_steps=1,
    )  # fmt: skip
    graded = grader(function, **config)
    score(graded, "a")
    score(graded, "b")
    for key, metric in graded.drain_metrics():
        record_metric(prefix + key, *metric)  # as the controller does
    values = recorder.flush(1)
    recorder.close()
    expected = {"mean": 3.0, "sum": 9.0, "max": 6.0, "min": 1.0, "std": (14 / 3) ** 0.5, "last": 6.0}
    expected["distribution/p50"] = 2.0
    found = {name: values.get(f"{prefix}mine/{name}") for name in expected}
    prefix_of_threads = prefix if function is records else ""  # a thread of an async function's own has no call
    assert values[f"{prefix_of_threads}mine/of_threads"] == 2.0
    assert found == pytest.approx(expected)
    assert values["obs/rejected_values"] == 2.0
    rows = [row for row in read_rows(tmp_path) if row["table"] == f"{prefix}mine/table"]
    assert sorted(row["text"] for row in rows) == ["a", "b"]


def test_what_a_failing_function_or_the_judgement_recorded_counts():
    def fails(completions, **_):
        record_metric("mine/before", 1.0)
        raise ValueError("no")

    class Judged(TaskOf):
        def judge(self, answer, prompt):
            record_metric("mine/judged", 1.0, "sum")
            return True

    built = build_grader(Grader.Config(on_failure="none"), Judged(fails))
    score(built, "a", "b")
    assert {key for key in logged(built) if key.startswith("mine/")} == {"mine/before", "mine/judged"}
