"""metrics.jsonl and the local store: killed in the middle of a write, resumed, bounded, read back."""

import json
import random
import time
from collections import Counter

import pytest

from tests.parts.observability import FORK, NASTY, group, rows_of, sample
from torchtitan_rl.observe import Recorder, Reduce, read_rows, record_metric
from torchtitan_rl.observe.line_file import LineFile, read_lines

STEPS = 40


def train(folder, pipe):
    """A run that checkpoints every fourth step and says so; resumes from its checkpoint, as a controller would."""
    config = Recorder.Config(sinks=["jsonl"], keep_all_rows=True)
    run = Recorder(config, run_folder=folder, run_name="r", run_config={}, total_steps=STEPS)
    checkpoint = folder / "checkpoint"
    first = int(checkpoint.read_text()) + 1 if checkpoint.exists() else 1
    for step in range(first, STEPS + 1):
        record_metric("loss", step)
        rows = [{"prompt_idx": i, "sample_idx": 0, "score": i, "response": "x" * 20_000} for i in range(100)]
        record_metric("t", rows, Reduce.TABLE)
        run.flush(step)
        if step % 4 == 0:
            run.state_dict()
            (folder / "checkpoint.tmp").write_text(str(step))
            (folder / "checkpoint.tmp").rename(checkpoint)
            pipe.send(step)
    run.close()


def start(folder):
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=train, args=(folder, theirs))
    process.start()
    return process, ours


def test_kill_9_during_writes_and_resume_keeps_each_step_once(tmp_path):
    chance = random.Random(0)
    for _ in range(4):
        process, pipe = start(tmp_path)
        assert pipe.recv() < STEPS
        time.sleep(chance.uniform(0.0, 0.05))
        process.kill()
        process.join()
        kept = Counter(row["step"] for row in read_rows(tmp_path))
        assert set(kept.values()) == {100}
    process, _ = start(tmp_path)
    process.join()
    steps = list(range(1, STEPS + 1))
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in metrics] == [(step, step) for step in steps]
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [step for step in steps for _ in range(100)]


@pytest.mark.parametrize("torn", ['{"step": 3, "los', '{"step": 3}', "\x00\x00"])
def test_incomplete_last_batch_is_truncated_on_open_and_skipped_on_read(tmp_path, torn):
    path = tmp_path / "f"
    file = LineFile(path, b" \n")
    file.append(1, [{"a": 1}, {"a": 2}])
    file.close()
    with open(path, "a") as partial:
        partial.write('{"step": 2, "a": 3}\n' + torn)
    assert [line["step"] for line in read_lines(path, b" \n")] == [1, 1]
    file = LineFile(path, b" \n")
    file.append(2, [{"a": 4}])
    file.close()
    assert [line.get("a") for line in read_lines(path, b" \n")] == [1, 2, 4]


@pytest.mark.parametrize(
    ("damage", "kept"),
    [
        (lambda line: line.replace(b'"x"', b'"\xff"'), [1, 2, 4, 5]),
        (lambda line: line.replace(b'"x"', b'x"'), [1, 2, 4, 5]),
        (lambda line: line.replace(b"\n", b" "), [1, 2, 5]),
        (lambda line: line.replace(b'"step": 3', b'"step": 9'), [1, 2, 9, 4, 5]),
        (lambda line: line[1:], [1, 2, 4, 5]),
    ],
)
@pytest.mark.parametrize("end", [b"\n", b" \n"])
def test_damaged_lines_are_left_out_and_writing_continues(tmp_path, damage, kept, end):
    path = tmp_path / "metrics.jsonl"
    file = LineFile(path, end)
    for step in range(1, 6):
        file.append(step, [{"value": "x"}])
    file.close()
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = damage(lines[2])
    path.write_bytes(b"".join(lines))

    file = LineFile(path, end)
    file.rewind(6)
    file.append(6, [{"value": "x"}])
    file.close()
    assert [line["step"] for line in read_lines(path, end)] == [*kept, 6]


def test_store_stops_at_its_byte_budget_with_a_warning(recorder, tmp_path, caplog):
    run = recorder(store_bytes=2000)
    for step in range(1, 8):
        record_metric("t", {"score": 1, "response": "x" * 500}, Reduce.TABLE)
        run.flush(step)
        run.sinks["local"].drain(5)
    values = run.flush(8)
    assert caplog.text.count("has reached its budget of 2,000 bytes") == 1
    kept = [row["step"] for row in read_rows(tmp_path)]
    assert kept == list(range(1, len(kept) + 1))
    assert 0 < len(kept) < 7
    assert values["obs/dropped_rows"] == 7 - len(kept)


def test_the_store_is_read_back_with_the_full_text_and_nested_cells(recorder, tmp_path):
    run = recorder(keep_all_rows=True)
    record_metric("rollout/samples", rows_of(group(0, sample(0, 1.0, text=NASTY))), Reduce.TABLE)
    record_metric("other", {"score": 1, "late": {"nested": [1]}}, Reduce.TABLE)
    run.flush(1)
    run.close()
    first, second = read_rows(tmp_path)
    assert (first["response"], second["late"]) == (NASTY, {"nested": [1]})


def test_every_line_of_metrics_jsonl_is_strict_json(recorder, tmp_path):
    run = recorder()
    for reduction in (Reduce.MEAN, Reduce.SUM) * 2:
        record_metric(reduction, 1e308, reduction)
    record_metric("emoji 👩‍💻 \ud800", 1.0)
    run.flush(1)
    run.close()

    def refuse(constant):
        raise AssertionError(constant)

    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=refuse)["step"] == 1
