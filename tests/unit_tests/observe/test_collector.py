"""record_metric: callable anywhere, never raises, never communicates; one flush merges what all ranks recorded."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from torchtitan_rl.events import timed
from torchtitan_rl.observe import Reduce, collector, record_metric
from torchtitan_rl.observe.line_file import read_lines
from torchtitan_rl.observe.store import read_rows


def test_ranks_may_record_different_keys_conditionally(ranks):
    world = ranks(4)
    world.record(2, "only/on/two", 5.0, Reduce.MAX)
    world.record(0, "only/on/zero", 1.0)
    values = world.flush(1)
    assert (values["only/on/two"], values["only/on/zero"]) == (5.0, 1.0)
    assert world.gathers == [1, 1, 1, 1]


def test_floats_integers_numpy_and_0_d_tensors_are_values(recorder):
    run = recorder()
    parameter = torch.tensor(2.0, requires_grad=True)
    for value in (1, 1.5, np.float32(1.5), torch.tensor(2), parameter * 1, True):
        record_metric("x", value, Reduce.SUM)
    assert run.flush(1)["x"] == pytest.approx(1 + 1.5 + 1.5 + 2 + 2 + 1)


def test_what_changes_after_the_call_keeps_its_recorded_value(recorder, tmp_path):
    run = recorder()
    loss, row = torch.zeros(()), {"score": 1.0, "response": "before"}
    record_metric("loss", loss)
    record_metric("t", row, Reduce.TABLE)
    loss += 5
    row["response"] = "after"
    assert run.flush(1)["loss"] == 0.0
    run.close()
    assert "before" in (tmp_path / "samples.jsonl").read_text()


def test_many_threads_lose_no_value(recorder):
    run = recorder()

    def work():
        for _ in range(2000):
            record_metric("n", 1, Reduce.SUM)

    with ThreadPoolExecutor(8) as pool:
        for _ in range(8):
            pool.submit(work)
    assert run.flush(1)["n"] == 16_000


def test_non_finite_values_are_counted_and_excluded_from_the_mean(ranks):
    world = ranks(2)
    for rank, value in ((0, 1.0), (0, float("nan")), (1, 3.0), (1, float("inf"))):
        world.record(rank, "loss", value)
    world.record(0, "all bad", float("nan"))
    values = world.flush(1)
    assert (values["loss"], values["loss/non_finite"], values["all bad/non_finite"]) == (2.0, 2, 1)
    assert "all bad" not in values


class Hostile:
    def __repr__(self):
        raise RuntimeError("no repr")


@pytest.mark.parametrize("value", ["text", None, [1.0], {"a": 1}, torch.ones(3), Hostile()])
def test_non_numeric_value_is_dropped_counted_and_warned_once(recorder, caplog, value):
    run = recorder()
    for _ in range(2):
        record_metric("x", value)
    record_metric("x", 2.0)
    values = run.flush(1)
    assert values["x"] == 2.0
    assert values["obs/rejected_values"] == 2
    assert caplog.text.count("metric 'x'") == 1
    record_metric(["unhashable"], 1.0)
    record_metric("t", {"cell": value, "score": 1}, Reduce.TABLE)
    assert run.flush(2)["obs/rejected_values"] == 3


def test_names_that_every_line_of_the_files_has_are_the_files_own(recorder, tmp_path, caplog):
    run = recorder()
    for key in ("step", "time"):
        record_metric(key, 7.0)
    record_metric("my/table", {"score": 2.0, "table": "oak", "run_id": "b", "step": 9}, Reduce.TABLE)
    run.flush(3)
    run.close()
    [line] = read_lines(tmp_path / "metrics.jsonl", b"\n")
    assert (line["step"], line["time"] > 1e9) == (3, True)
    assert caplog.text.count("use another name") == 2
    [row] = read_rows(tmp_path)
    assert (row["table"], row["step"], row["run_id"]) == ("my/table", 3, (tmp_path / "run_id").read_text())


@pytest.mark.parametrize(
    "value", [[1.0, 2.0, 6.0], (1, 2, 6), np.float32([1, 2, 6]), torch.tensor([1, 2, 6]).bfloat16()]
)
def test_a_distribution_takes_lists_arrays_and_1_d_tensors(recorder, value):
    run = recorder()
    record_metric("x", value, Reduce.DISTRIBUTION)
    record_metric("x", 3.0, Reduce.DISTRIBUTION)
    assert run.flush(1)["x/p50"] == 2.5


def test_an_error_on_the_gpu_is_raised_and_not_that_its_memory_cannot_be_asked_for(recorder, monkeypatch):
    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    recorder()
    monkeypatch.setattr(collector, "ON_CPU", False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    with pytest.raises(KeyError, match="the cause"), timed("train"):
        raise KeyError("the cause")
