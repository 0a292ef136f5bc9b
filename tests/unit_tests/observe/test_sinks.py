"""Each sink against its real library: what was recorded is read back, model output survives, resumption works."""

import html
import importlib.util
import json
import os
import sqlite3
import struct
import time
from collections import Counter
from contextlib import nullcontext

import pytest

from tests.parts.observability import FORK, NASTY, RECORD_STEPS, record_run
from torchtitan_rl.command.first_check import check_at_once
from torchtitan_rl.command.registry import load_config
from torchtitan_rl.errors import UserError
from torchtitan_rl.observe import Recorder, Reduce, record_metric


def tensorboard_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0, "histograms": 0})
    events.Reload()
    return events


def test_tensorboard_holds_scalars_histograms_and_a_markdown_table(recorder, tmp_path):
    record_run(recorder(sinks=["tensorboard"]))
    events = tensorboard_events(tmp_path / "tensorboard")
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(s, 6.5) for s in (1, 2, 3)]
    assert len(events.Histograms("reward/histogram")) == 3
    texts = [t.tensor_proto.string_val[0].decode() for t in events.Tensors("rollout/samples/text_summary")]
    assert len(texts) == 3
    lines = texts[0].split("\n")
    assert all(line.count("|") == 1 + 1 + 3 for line in lines), "a column of names and one for each of three samples"
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| <pre>prompt</pre>", "| <pre>response</pre>"]
    assert "<script>" not in texts[0]
    assert "[/answer] list[int] [bold]x[/]" in html.unescape(texts[0])
    assert "eval" in events.Tensors("evaluation/samples/text_summary")[0].tensor_proto.string_val[0].decode()


def test_tensorboard_takes_a_distribution_of_numbers_beyond_its_bins(recorder, tmp_path):
    run = recorder(sinks=["tensorboard"])
    record_metric("x", [1e30, -1e300], Reduce.DISTRIBUTION)
    run.flush(1)
    run.close()
    assert len(tensorboard_events(tmp_path / "tensorboard").Histograms("x/histogram")) == 1


def test_tensorboard_shows_each_step_once_after_a_resumption(recorder, tmp_path):
    for steps in ((1, 2, 3, 4), (3, 4, 5)):
        run = recorder(sinks=["tensorboard"])
        for step in steps:
            record_metric("x", step * len(steps))
            run.flush(step)
        run.close()
    scalars = tensorboard_events(tmp_path / "tensorboard").Scalars("x")
    assert [(e.step, e.value) for e in scalars] == [(1, 4), (2, 8), (3, 9), (4, 12), (5, 15)]


def wandb_log_entries(path):
    """The entries of a .wandb file: LevelDB's log format (blocks of 32 KiB, entries in fragments) after 7 bytes."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, entry = 7, b""
    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:
            position += left_in_block
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        if position + 7 + length > len(data):
            return
        entry += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield entry
            entry = b""


def wandb_records(run_folder):
    """The newest offline run's files, every record of its log, and its history as dicts.

    wandb-core, a process of its own, may write its last block a moment after `finish` returns.
    """
    from wandb.proto import wandb_internal_pb2

    path = max(run_folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    records = []
    deadline = time.monotonic() + 20
    while not any(record.HasField("exit") for record in records) and time.monotonic() < deadline:
        records = [wandb_internal_pb2.Record.FromString(entry) for entry in wandb_log_entries(path)]
        time.sleep(0.02)
    history = []
    for record in records:
        if record.HasField("history"):
            history.append({})
            for item in record.history.item:
                *outer, name = item.nested_key or [item.key]
                place = history[-1]
                for key in outer:
                    place = place.setdefault(key, {})
                place[name] = json.loads(item.value_json)
    return path.parent / "files", records, history


def rows_of_table(files, entry):
    """The rows of a logged table as dicts of its columns."""
    table = json.loads((files / entry["path"]).read_text())
    return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


@pytest.fixture
def wandb_run(recorder, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("sys.argv", ["train", "--task.api-key", "hunter-12345"])
    record_run(recorder(sinks=["jsonl", "wandb"], project="p"))
    return wandb_records(tmp_path)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "a login to W&B. Call `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"),
        ({"WANDB_API_KEY": "bad"}, "WANDB_API_KEY invalid: .* Call `wandb login`"),
        ({"WANDB_MODE": "offline"}, ""),
    ],
)
def test_wandb_without_a_login_says_so_before_the_run_unless_it_is_offline(tmp_path, monkeypatch, variables, message):
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # it keeps the settings of the process's first use
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), **variables}.items():
        monkeypatch.setenv(name, value)
    config = load_config("debug")
    config.metrics.sinks = ["wandb"]
    with pytest.raises(UserError, match=message) if message else nullcontext():
        check_at_once(config)
    wandb.teardown()


def test_wandb_offline_holds_scalars_histograms_config_and_step_and_never_the_command_line(wandb_run, tmp_path):
    _, records, history = wandb_run
    assert [line["step"] for line in history if "reward/mean" in line] == [1, 2, 3]
    assert {line["reward/mean"] for line in history if "reward/mean" in line} == {6.5}
    assert all(line["reward/histogram"]["_type"] == "histogram" for line in history if "reward/mean" in line)
    config = [update.key for r in records if r.HasField("run") for update in r.run.config.update]
    assert {"lr", "model"} <= set(config)
    metrics = [r.metric for r in records if r.HasField("metric")]
    assert any(m.glob_name == "*" and m.step_metric == "step" for m in metrics)
    # The command line may hold secrets.
    assert [path for path in tmp_path.rglob("*") if path.is_file() and b"hunter-12345" in path.read_bytes()] == []


def test_wandb_tables_keep_history_in_increments_and_a_final_immutable_copy(wandb_run):
    files, _, history = wandb_run
    logged = [line["rollout/samples"] for line in history if "rollout/samples" in line]
    assert [entry["_type"] for entry in logged] == ["incremental-table-file"] * 3
    tables = [rows_of_table(files, entry) for entry in logged]
    assert [{row["step"] for row in rows} for rows in tables] == [{1}, {1, 2}, {3}]
    assert ["extra/note" in rows[0] for rows in tables[:2]] == [False, True]
    [final] = [line["rollout/samples/final"] for line in history if "rollout/samples/final" in line]
    assert (final["_type"], final["log_mode"]) == ("table-file", "IMMUTABLE")
    rows = rows_of_table(files, final)
    assert {row["step"] for row in rows} == {1, 2, 3}
    assert NASTY.replace("\ud800", "\\ud800") in [row["response"] for row in rows]
    assert any("evaluation/samples/final" in line for line in history)


@pytest.mark.parametrize(("config", "project"), [({}, "theirs"), ({"project": "ours"}, "ours")])
def test_wandb_takes_mode_project_and_name_from_the_environment_unless_the_config_has_them(
    config, project, recorder, tmp_path, monkeypatch
):
    for name, value in {"MODE": "offline", "PROJECT": "theirs", "NAME": "my name", "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    record_run(recorder(sinks=["wandb"], **config))
    _, records, _ = wandb_records(tmp_path)
    [run] = [record.run for record in records if record.HasField("run")]
    assert (run.project, run.display_name) == (project, "my name")


def test_wandb_final_tables_of_a_resumed_run_have_the_rows_of_all_sessions_that_the_filter_takes(
    recorder, tmp_path, monkeypatch
):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for steps in ((1, 2, 3), (3, 4)):  # step 3 is taken again from the checkpoint of step 2
        if steps[0] > 1:
            time.sleep(1.1)  # a second offline run of the same second would take the first one's folder
        run = recorder(sinks=["wandb"], select=["top:1", "bottom:1"], keep_all_rows=True, filters=["wandb=!hidden"])
        for step in steps:
            rows = [{"prompt": f"{step}", "score": score, "note": f"{steps[0]}"} for score in range(6)]
            for key in ["own", "hidden"] + ["rare"] * (step == 1):
                record_metric(key, rows, Reduce.TABLE)
            run.flush(step)
        run.close()
    files, _, history = wandb_records(tmp_path)
    finals = {key: entry for line in history for key, entry in line.items() if key.endswith("/final")}
    assert sorted(finals) == ["own/final", "rare/final"]
    assert not any("hidden" in line for line in history)
    rows = rows_of_table(files, finals["own/final"])
    assert Counter((row["step"], row["note"]) for row in rows) == {(1, "1"): 2, (2, "1"): 2, (3, "3"): 2, (4, "3"): 2}
    assert {row["select_reason"] for row in rows} == {"top", "bottom"}
    assert "run_id" not in rows[0]
    increments = [rows_of_table(files, line["own"]) for line in history if "own" in line]
    assert [{row["step"] for row in table} for table in increments] == [{3}, {4}]


def trackio_run(tmp_path):
    """A run in a process of its own: Trackio reads its folder when it is imported."""
    os.environ["TRACKIO_DIR"] = str(tmp_path / "trackio")
    config = Recorder.Config(
        sinks=["jsonl", "trackio"], project="proj", max_traces_per_step=6, filters=["trackio=!odd*"]
    )
    record_run(Recorder(config, run_folder=tmp_path / "run", run_name="r", run_config={}, total_steps=RECORD_STEPS))


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="pip install trackio")
def test_trackio_has_scalars_tables_and_traces_with_each_response_under_its_own_prompt(tmp_path):
    process = FORK.Process(target=trackio_run, args=(tmp_path,))
    process.start()
    process.join(100)
    assert process.exitcode == 0
    database = sqlite3.connect(tmp_path / "trackio" / "proj.db")
    metrics = [(step, json.loads(text)) for step, text in database.execute("SELECT step, metrics FROM metrics")]
    scalars = {step: values for step, values in metrics if "reward/mean" in values}
    assert sorted(scalars) == [1, 2, 3]
    assert not [key for key in scalars[1] if key.startswith("odd")]  # as the filter says
    table = scalars[1]["rollout/samples"]
    assert table["_type"] == "trackio.table"
    assert {row["step"] for row in table["_value"]} == {1}
    assert NASTY.replace("\ud800", "\\ud800") in [row["response"] for row in table["_value"]]
    selected = database.execute("SELECT step, key, messages, metadata FROM traces ORDER BY step, trace_index")
    traces = [(step, key, json.loads(messages), json.loads(data)) for step, key, messages, data in selected]
    splits = Counter((step, metadata["split"]) for step, *_, metadata in traces)
    assert splits == {(step, split): n for step in (1, 2, 3) for split, n in (("train", 6), ("eval", 4))}
    for step, key, messages, metadata in traces:
        prompt, sample = metadata["prompt_idx"], metadata["sample_idx"]
        response = NASTY.replace("\ud800", "\\ud800") if (prompt, sample) == (1, 3) else f"[ANSWER] {prompt}-{sample}"
        assert key == "rollout/traces"
        asked = {"role": "user", "content": f"question {prompt} \\ud800"}
        assert messages == [asked, {"role": "assistant", "content": response}]
        assert (metadata["step"], metadata["reward"]) == (step, 10 * prompt + sample)
        assert {"split", "policy_version", "advantage", "finish_reason", "expected_answer"} <= set(metadata)
        assert not {"prompt", "response", "messages", "tokens"} & set(metadata)
    assert len({metadata["episode_id"] for *_, metadata in traces}) == 30
