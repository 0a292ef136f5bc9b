"""record_metric: callable anywhere, never raises, never communicates; one flush merges what all ranks recorded."""

import threading

import numpy as np
import pytest
import torch

from torchtitan_rl.observability import Reduce, record_metric


def test_mean_of_ranks_with_1_1_1_and_0_is_0_75_with_one_gather(ranks):
    world = ranks(2)
    for value in (1, 1, 1):
        world.record(0, "reward/mean", value)
    world.record(1, "reward/mean", 0)
    assert world.flush(1)["reward/mean"] == 0.75
    assert world.gathers == [1, 1]


def test_ranks_may_record_different_keys_conditionally(ranks):
    world = ranks(4)
    world.record(2, "only/on/two", 5.0, Reduce.MAX)
    world.record(0, "only/on/zero", 1.0)
    values = world.flush(1)
    assert values["only/on/two"] == 5.0
    assert values["only/on/zero"] == 1.0
    assert world.gathers == [1, 1, 1, 1]


def test_floats_integers_numpy_and_0_d_tensors_are_values(recorder):
    run = recorder()
    parameter = torch.tensor(2.0, requires_grad=True)
    for value in (1, 1.5, np.float32(1.5), torch.tensor(2), parameter * 1, True):
        record_metric("x", value, Reduce.SUM)
    assert run.flush(1)["x"] == pytest.approx(1 + 1.5 + 1.5 + 2 + 2 + 1)


def test_a_tensor_changed_after_the_call_keeps_the_recorded_value(recorder):
    run = recorder()
    loss = torch.zeros(())
    record_metric("loss", loss)
    loss += 5
    assert run.flush(1)["loss"] == 0.0


def test_device_tensor_is_read_at_flush_and_an_unreadable_one_is_counted(recorder, caplog):
    run = recorder()
    record_metric("x", torch.empty((), device="meta"))
    assert caplog.text == ""
    record_metric("x", 2.0)
    values = run.flush(1)
    assert (values["x"], values["obs/rejected_values"]) == (2.0, 1)
    assert "metric 'x'" in caplog.text


def test_a_row_changed_after_the_call_keeps_the_recorded_cells(recorder, tmp_path):
    run = recorder()
    row = {"score": 1.0, "response": "before"}
    record_metric("t", row, Reduce.TABLE)
    row["response"] = "after"
    run.flush(1)
    run.close()
    assert "before" in (tmp_path / "samples.jsonl").read_text()


def test_many_threads_lose_no_value(recorder):
    run = recorder()

    def work():
        for _ in range(2000):
            record_metric("n", 1, Reduce.SUM)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert run.flush(1)["n"] == 16_000


def test_non_finite_values_are_counted_and_excluded_from_the_mean(ranks):
    world = ranks(2)
    for rank, value in ((0, 1.0), (0, float("nan")), (1, 3.0), (1, float("inf"))):
        world.record(rank, "loss", value)
    world.record(0, "all bad", float("nan"))
    values = world.flush(1)
    assert values["loss"] == 2.0
    assert values["loss/non_finite"] == 2
    assert "all bad" not in values
    assert values["all bad/non_finite"] == 1


def test_two_reductions_of_one_key_warn_with_both_call_sites_and_the_first_wins(recorder, caplog):
    run = recorder()
    record_metric("x", 1.0, Reduce.MEAN)
    for _ in range(3):
        record_metric("x", 5.0, Reduce.MAX)
    assert run.flush(1)["x"] == 4.0
    warnings = [record.message for record in caplog.records if "Reduce.MAX" in record.message]
    assert len(warnings) == 1
    assert warnings[0].count("test_collector.py:") == 2


@pytest.mark.parametrize("value", ["text", None, [1.0], {"a": 1}, torch.ones(3), object()])
def test_non_numeric_value_is_dropped_counted_and_warned_once(recorder, caplog, value):
    run = recorder()
    for _ in range(2):
        record_metric("x", value)
    record_metric("x", 2.0)
    values = run.flush(1)
    assert values["x"] == 2.0
    assert values["obs/rejected_values"] == 2
    assert caplog.text.count("metric 'x'") == 1


def test_invalid_row_or_reduction_is_dropped_with_a_warning(recorder, caplog):
    run = recorder()
    record_metric("t", ["no dict"], Reduce.TABLE)
    record_metric("u", 1.0, "median")
    assert run.flush(1)["obs/rejected_values"] == 2
    assert "expected a dict or a list of dicts" in caplog.text
    assert "median" in caplog.text


def test_recording_without_a_recorder_warns_once(caplog):
    for _ in range(3):
        record_metric("early", 1.0)
    assert caplog.text.count("no Recorder is running") == 1


def test_with_metrics_off_there_is_one_warning_no_file_and_the_gather_is_still_called(recorder, caplog, tmp_path):
    calls = []
    run = recorder(enabled=False, gather=lambda collection: calls.append(1) or [collection])
    for _ in range(3):
        record_metric("x", 1.0)
    assert run.flush(1) == {}
    run.close()
    assert caplog.text.count("metrics are off") == 1
    assert calls == [1]
    assert list(tmp_path.iterdir()) == []


def test_counters_maxima_and_quantiles_are_not_averaged_over_the_steps_between_two_flushes(recorder):
    run = recorder()
    for step in (1, 2, 3):
        record_metric("optimizer/step", step, Reduce.LAST)
        record_metric("tokens", 10, Reduce.SUM)
        record_metric("length/max", step, Reduce.MAX)
        record_metric("length/min", step, Reduce.MIN)
        record_metric("q", step, Reduce.DISTRIBUTION)
        record_metric("loss", step)
    values = run.flush(3)
    assert (values["optimizer/step"], values["tokens"], values["length/max"], values["length/min"]) == (3, 30, 3, 1)
    assert (values["q/p50"], values["loss"]) == (2, 2)


def test_unprintable_keys_and_values_never_raise(recorder):
    class Hostile:
        def __repr__(self):
            raise RuntimeError("no repr")

    run = recorder()
    record_metric("x", Hostile())
    record_metric(["unhashable"], 1.0)
    record_metric(7, 1.0)
    record_metric("t", {"cell": Hostile(), "score": 1}, Reduce.TABLE)
    assert run.flush(1)["obs/rejected_values"] == 3


@pytest.mark.parametrize(
    "value", [[1.0, 2.0, 6.0], (1, 2, 6), np.float32([1, 2, 6]), torch.tensor([1, 2, 6]).bfloat16()]
)
def test_a_distribution_takes_lists_arrays_and_1_d_tensors(recorder, value):
    run = recorder()
    record_metric("x", value, Reduce.DISTRIBUTION)
    record_metric("x", 3.0, Reduce.DISTRIBUTION)
    assert run.flush(1)["x/p50"] == 2.5
