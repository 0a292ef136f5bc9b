"""The recorder: modes of sinks, schema over time, evaluation beside training, start-up errors, many processes."""

import io
import json
import subprocess
import sys
import textwrap

import pytest
import torch.distributed as dist

from tests.parts.observability import FORK, group, rows_of, sample
from torchtitan_rl.core.errors import UserError
from torchtitan_rl.observability import Recorder, Reduce, read_rows, read_samples, record_metric


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_per_rank_reduce_writes_each_rank_s_own_value(ranks, tmp_path):
    world = ranks(2, sinks=["jsonl:per_rank_reduce"])
    for value in (1.0, 2.0):
        world.record(0, "x", value)
        world.record(1, "x", 10 * value)
    assert world.flush(1)["x"] == 8.25
    for one in world.recorders:
        one.close()
    assert [line["x"] for line in lines(tmp_path / "metrics.rank0.jsonl")] == [1.5]
    assert [line["x"] for line in lines(tmp_path / "metrics.rank1.jsonl")] == [15.0]


def test_a_missing_library_is_a_clear_message_with_the_install_command(recorder, monkeypatch):
    from torchtitan_rl.observability.sinks.wandb import WandbSink

    monkeypatch.setattr(WandbSink, "requires", "library_that_is_missing")
    with pytest.raises(UserError, match="pip install library_that_is_missing"):
        recorder(sinks=["wandb"])


def test_no_sink_s_library_is_imported_unless_used_and_an_exit_without_close_loses_nothing(tmp_path):
    script = """
        import sys
        from pathlib import Path
        from torchtitan_rl.observability import Recorder, record_metric
        run = Recorder(Recorder.Config(sinks=["jsonl"]), run_folder=Path(sys.argv[1]), run_name="r", run_config={},
                       total_steps=1)
        record_metric("x", 1.0); run.flush(1)
        print([m for m in ("wandb", "trackio", "tensorboard", "rich", "pandas", "pyarrow", "vllm") if m in sys.modules])
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines()[0] == "[]", done.stderr
    assert [line["x"] for line in lines(tmp_path / "metrics.jsonl")] == [1.0]


def test_columns_can_be_left_out_of_every_table_and_file(recorder, tmp_path, monkeypatch, caplog):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    hidden = ["prompt", "example/*", "messages"]
    run = recorder(sinks=["jsonl", "console"], console_every=1, leave_out_columns=hidden)
    one = group(0, sample(0, 1.0), sample(1, 2.0), columns={"secret": "xyzzy", "n": 1})
    record_metric("rollout/samples", rows_of(one), Reduce.TABLE)
    run.flush(1)
    run.close()
    rows = list(read_rows(tmp_path))
    assert rows
    assert not {"prompt", "example/secret", "example/n"} & rows[0].keys()
    assert {"response", "reward", "step", "select_reason"} <= rows[0].keys()
    assert "xyzzy" not in stream.getvalue()
    named = [record.getMessage() for record in caplog.records if "leave_out_columns" in record.getMessage()]
    assert named == ["metrics.leave_out_columns 'messages': no table has had such a column so far"]


def conditional_run(rank, folder, results):
    """What each of two processes does: means on both, one key on rank 1 in step 2 alone, a row each."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)

    def gather(value):
        found = [None, None] if rank == 0 else None
        dist.gather_object(value, found)
        return found

    config = Recorder.Config(sinks=["jsonl"])
    run = Recorder(
        config, run_folder=folder / "run", run_name="r", run_config={}, total_steps=3, rank=rank, gather=gather
    )
    for step in range(1, 4):
        for value in ([1, 1, 1], [0])[rank]:
            record_metric("mean", value)
        if rank == 1 and step == 2:
            record_metric("rare", 7.0, Reduce.MAX)
        record_metric("t", {"prompt_idx": rank, "sample_idx": 0, "score": rank, "odd": lambda: 0}, Reduce.TABLE)
        values = run.flush(step)
    run.close()
    dist.destroy_process_group()
    results.put((rank, values.get("mean")))


def test_two_processes_with_different_keys_merge_without_hanging(tmp_path):
    results = FORK.SimpleQueue()
    processes = [FORK.Process(target=conditional_run, args=(rank, tmp_path, results)) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
    assert [process.exitcode for process in processes] == [0, 0]
    assert sorted([results.get(), results.get()]) == [(0, 0.75), (1, None)]
    found = lines(tmp_path / "run" / "metrics.jsonl")
    assert [line.get("rare") for line in found] == [None, 7.0, None]
    assert {row["prompt_idx"] for row in read_samples(tmp_path / "run").to_pylist()} == {0, 1}
