"""Rule zero: no exception, full disk, blocked sink or odd gather changes training."""

import threading
import time

import pytest
import torch

from tests.parts.observability import group, rows_of, sample
from torchtitan_rl.observe import Reduce, record_metric
from torchtitan_rl.observe.observer import RankObserver
from torchtitan_rl.observe.sinks import SINKS, Sink

STEPS = 12


class ExitingSink(Sink):
    def write(self, record):
        raise SystemExit(3)


class UnbuildableSink(ExitingSink):
    def __init__(self, context):
        raise RuntimeError("no account")


class BlockedSink(Sink):
    release = threading.Event()

    def write(self, record):
        self.release.wait(60)

    def rewind(self, step):
        """Defined: a checkpoint waits for it."""


class SlowlyClosedSink(Sink):
    closed = False

    def write(self, record):
        pass

    def close(self):
        time.sleep(1.5)
        type(self).closed = True


@pytest.fixture(autouse=True)
def faulty(monkeypatch):
    monkeypatch.setattr("torchtitan_rl.observe.recorder.QUEUE_SIZE", 2)
    sinks = {"exiting": ExitingSink, "unbuildable": UnbuildableSink, "blocked": BlockedSink, "slow": SlowlyClosedSink}
    for name, sink in sinks.items():
        monkeypatch.setitem(SINKS, name, f"{__name__}:{sink.__name__}")
    BlockedSink.release.clear()
    yield
    BlockedSink.release.set()


def train(run):
    """The losses of a little training run, with dropout so that any use of the random state would show."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for step in range(1, STEPS + 1):
        loss = model(torch.randn(16, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if run is not None:
            record_metric("loss", loss)
            record_metric("rollout/samples", rows_of(group(0, sample()), step=step), Reduce.TABLE)
            run.flush(step)
    return torch.stack(losses)


@pytest.mark.parametrize("sink", ["exiting", "unbuildable", "blocked"])
def test_a_faulty_sink_changes_neither_the_loss_curve_nor_the_step_count(recorder, sink, tmp_path):
    without = train(None)
    run = recorder(sinks=[sink, "jsonl"])
    started = time.monotonic()
    with_sink = train(run)
    assert time.monotonic() - started < 30
    assert torch.equal(with_sink, without)
    BlockedSink.release.set()
    run.close()
    # On a busy machine the queue of 2 may be full now and then: what is dropped is counted.
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == STEPS - run.sinks["jsonl"].dropped_steps


def test_full_queue_drops_and_counts_rows_with_one_warning(recorder, caplog):
    run = recorder(sinks=["blocked"])
    for step in range(1, 9):
        rows = rows_of(group(0, *(sample(s, float(s)) for s in range(3))), step=step)
        record_metric("t", rows, Reduce.TABLE)
        values = run.flush(step)
    dropped = run.sinks["blocked"].dropped_steps
    assert dropped >= 5
    assert values["obs/dropped_rows"] >= 2 * (dropped - 1)
    assert caplog.text.count("sink blocked: too slow") == 1


def test_blocked_sink_does_not_use_up_the_close_time_of_others(recorder, monkeypatch):
    monkeypatch.setattr("torchtitan_rl.observe.recorder.CLOSE_SECONDS", 2.5)
    run = recorder(sinks=["blocked", "slow"])
    for step in range(1, 5):
        run.flush(step)
    run.close()
    assert SlowlyClosedSink.closed, "it had the whole time, not what the stuck one left of it"


def test_a_failed_gather_or_collection_loses_metrics_without_raising_and_gathers_once(recorder, monkeypatch, caplog):
    calls = []

    def broken(collection):
        calls.append(collection)
        raise RuntimeError("connection lost")

    run = recorder(gather=broken)
    record_metric("loss", 1.0)
    assert run.flush(1)["loss"] == 1.0
    monkeypatch.setattr(run.collector, "drain", lambda: 1 / 0)
    run.flush(2)
    assert RankObserver(run).hand_over() == {"series": {}, "tables": {}}  # of a rank that samples for others
    assert len(calls) == 2
    assert caplog.text.count("gathering failed") == 1


def test_a_checkpoint_waits_a_bounded_time_for_a_blocked_file(recorder, monkeypatch, caplog):
    monkeypatch.setattr("torchtitan_rl.observe.recorder.CHECKPOINT_SECONDS", 0.2)
    run = recorder(sinks=["blocked"])
    run.flush(1)
    started = time.monotonic()
    run.state_dict()
    assert time.monotonic() - started < 20
    assert "sink blocked: steps before this checkpoint are not all written" in caplog.text
