"""The recorder: modes of sinks, schema over time, evaluation beside training, start-up errors, many processes."""

import io
import json
import subprocess
import sys
import textwrap

import pytest

from tests.parts.observability import group, rows_of, sample
from torchtitan_rl.errors import UserError
from torchtitan_rl.observe import Reduce, read_rows, record_metric


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_missing_library_is_a_clear_message_with_the_install_command(recorder, monkeypatch):
    from torchtitan_rl.observe.sinks.wandb import WandbSink

    monkeypatch.setattr(WandbSink, "requires", "library_that_is_missing")
    with pytest.raises(UserError, match="pip install library_that_is_missing"):
        recorder(sinks=["wandb"])


def test_no_sink_s_library_is_imported_unless_used_and_an_exit_without_close_loses_nothing(tmp_path):
    script = """
        import sys
        from pathlib import Path
        from torchtitan_rl.observe import Recorder, record_metric
        run = Recorder(Recorder.Config(sinks=["jsonl"]), run_folder=Path(sys.argv[1]), run_name="r", run_config={},
                       total_steps=1)
        record_metric("x", 1.0); run.flush(1)
        print([m for m in ("wandb", "trackio", "tensorboard", "rich", "pandas", "pyarrow", "vllm") if m in sys.modules])
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines()[0] == "[]", done.stderr
    assert [line["x"] for line in lines(tmp_path / "metrics.jsonl")] == [1.0]


def test_columns_can_be_left_out_of_every_table_and_file(recorder, tmp_path, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    hidden = ["prompt", "example/*", "messages"]
    run = recorder(sinks=["jsonl", "console"], console_every=1, leave_out_columns=hidden)
    one = group(0, sample(0, 1.0), sample(1, 2.0), columns={"secret": "xyzzy", "n": 1})
    record_metric("rollout/samples", rows_of(one), Reduce.TABLE)
    run.flush(1)
    run.close()
    row = next(read_rows(tmp_path))
    assert not {"prompt", "example/secret", "example/n"} & row.keys()
    assert {"response", "reward", "step", "select_reason"} <= row.keys()
    assert "xyzzy" not in stream.getvalue()


def test_filters_thin_the_series_and_keep_sample_texts_off_one_sink_alone(recorder, tmp_path):
    filters = ["jsonl=!*/p[0-9]*,reward/mean:2,!obs/*", "local=!rollout/*"]
    run = recorder(sinks=["jsonl"], filters=filters)
    for step in (1, 2):
        record_metric("reward/mean", 0.5)
        record_metric("reward", [0.0, 1.0], Reduce.DISTRIBUTION)
        record_metric("mine", 1.0)
        record_metric("rollout/samples", {"score": 1}, Reduce.TABLE)
        record_metric("other/samples", {"score": 2}, Reduce.TABLE)
        run.flush(step)
    run.close()
    keys = [line.keys() - {"step", "time"} for line in lines(tmp_path / "metrics.jsonl")]
    assert keys == [{"mine"}, {"mine", "reward/mean"}]
    assert {row["table"] for row in read_rows(tmp_path)} == {"other/samples"}


def test_a_run_id_that_a_full_disk_left_empty_is_made_anew(recorder, tmp_path):
    (tmp_path / "run_id").touch()
    recorder()
    assert len((tmp_path / "run_id").read_text()) == 8


@pytest.mark.parametrize("entry", ["wandb=x", "jsonl", "jsonl=", "jsonl=x,,y"])
def test_a_filter_without_patterns_or_of_a_sink_that_is_not_there_is_refused(recorder, entry):
    with pytest.raises(UserError, match="metrics.filters"):
        recorder(sinks=["jsonl"], filters=[entry])
