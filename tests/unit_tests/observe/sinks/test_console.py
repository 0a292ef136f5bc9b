"""The console sink: its lines fit a terminal, and what the model wrote cannot harm one."""

import io
import re
import sys

import pytest

from tests.parts.metric_pages import documented_keys
from tests.parts.observability import record_run
from torchtitan_rl.observe import record_metric
from torchtitan_rl.observe.panels import plain_console, sample_panel
from torchtitan_rl.observe.sinks.console import BUILT_IN_GROUPS


class Terminal(io.StringIO):
    def isatty(self):
        return True


def console_output(recorder, monkeypatch, stream=None, **config):
    """What three steps print."""
    stream = stream or io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    record_run(recorder(sinks=["console"], total_steps=3, **config))
    return stream.getvalue()


def printed(recorder, monkeypatch, values, **config):
    """What a step with these values prints."""
    monkeypatch.setattr(sys, "stdout", stream := io.StringIO())
    run = recorder(sinks=["console"], **config)
    for key, value in values.items():
        record_metric(key, value)
    run.flush(1)
    run.close()
    return stream.getvalue()


def test_console_prints_one_aligned_line_a_step_and_one_more_for_evaluations(recorder, monkeypatch):
    output = console_output(recorder, monkeypatch, console_every=0).splitlines()
    steps = [line for line in output if line.startswith("step ")]
    assert len(steps) == 3
    assert [line.index("ETA") for line in steps] == [steps[0].index("ETA")] * 3
    assert "1/3" in steps[0]
    assert "reward  6.500" in steps[0]
    assert output[1].split() == ["evaluation", "accuracy=0.5"]
    assert len(output) == 7


def test_console_ends_with_the_way_of_the_held_out_accuracy(recorder, monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream := io.StringIO())
    run = recorder(sinks=["console"], console_every=0)
    for step, accuracy in enumerate([0.648, 0.7, 0.98]):
        record_metric("evaluation/accuracy", accuracy)
        run.flush(step)
    run.close()
    assert stream.getvalue().splitlines()[-1] == "held-out accuracy: 64.8% at step 0, 98.0% at step 2"


def test_a_sample_s_box_has_no_number_that_only_a_paper_explains():
    row = {"response": "4", "reward": 1.0, "q_mass": 0.1, "update_mass_proxy": 0.2, "logprob_diff_max": 0.3}
    console = plain_console()
    with console.capture() as captured:
        console.print(sample_panel(row, console))
    assert re.findall(r"\w+=", captured.get()) == ["reward="]


LINE = {
    "reward/mean": -12.345, "train/accuracy": 1.0, "loss/total": -0.0264, "policy/entropy": 0.023, "time/step": 1234.5,
    "completions/clipped_fraction": 0.125, "optimizer/grad_norm": 0.316, "perf/step_tokens_per_s": 123456.0,
}  # fmt: skip


@pytest.mark.parametrize(("columns", "last_label"), [(80, "accuracy"), (120, "entropy"), (160, "tok/s")])
@pytest.mark.parametrize("steps", [50, 2000])
def test_a_step_line_fits_its_terminal(recorder, monkeypatch, columns, last_label, steps):
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("COLUMNS", str(columns))
    run = recorder(sinks=["console"], console_every=0, total_steps=steps)
    for step in (1, 2):
        for key, value in LINE.items():
            record_metric(key, value)
        run.flush(step)
    run.close()
    lines = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()).splitlines()
    shown = [line for line in lines if line.startswith("step ")]
    assert [len(line) <= columns for line in lines] == [True] * len(lines), max(lines, key=len)
    assert last_label in shown[0]


def test_console_shows_model_output_without_terminal_escapes(recorder, monkeypatch):
    output = console_output(recorder, monkeypatch, console_every=1)
    assert r"[/answer] list[int] [bold]x[/] \x1b[31mred\x1b[0m" in output
    assert "<script>alert(1)</script>" in output
    assert "👩‍💻" in output
    assert "\\ud800" in output
    for harmful in ("\x1b", "\x00", "\x9b", "\u202e", "\x07"):
        assert harmful not in output


def test_an_evaluation_shows_percent_for_shares_alone_and_those_of_right_answers_first(recorder, monkeypatch):
    measures = {"extra/right/accuracy": 120.0, "mine/accuracy": 120.0, "extra/right/format_rate": 3.0}
    measures |= {"format_rate": 1.0, "accuracy": 0.5, "accuracy_low": 0.4, "accuracy_high": 0.6}
    output = printed(recorder, monkeypatch, {f"evaluation/{name}": value for name, value in measures.items()})
    shown = output[output.index("evaluation") :].split()
    assert shown[1:4] == ["accuracy=50.0%", "(40.0", "to"]
    assert shown[5:9] == [
        "extra/right/accuracy=120", "mine/accuracy=120", "extra/right/format_rate=3", "format_rate=100.0%"
    ]  # fmt: skip


def test_a_table_of_one_s_own_may_have_any_cell_in_a_column_of_samples(recorder, monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream := io.StringIO())
    run = recorder(sinks=["console"], console_every=1)
    rows = [
        {"score": 1, "messages": "a text", "split": 3},
        {"score": 2, "conversation": ["one", {"content": "two"}, 3]},
    ]
    for row in rows:
        record_metric("my/table", row, "table")
    run.flush(1)
    run.close()
    assert not run.sinks["console"].disabled
    assert re.findall(r"(?:user|assistant|message) (\w+)", stream.getvalue()) == ["a", "one", "two", "3"]


def test_what_a_reward_function_logs_has_no_interval(recorder, monkeypatch):
    logged = {"evaluation/extra/shop/price": 7.0, "evaluation/extra/shop/price_low": 5.0}
    assert "shop/price=7  extra/shop/price_low=5" in printed(recorder, monkeypatch, logged)


def test_a_step_line_has_the_numbers_that_a_run_has_and_a_known_0_is_shown(recorder, monkeypatch):
    rewarded = printed(recorder, monkeypatch, {"time/step": 1.0, "reward/mean": 0.0, "train/accuracy": 0.0})
    assert rewarded.splitlines()[0].split()[2:6] == ["reward", "0.000", "accuracy", "0.0%"]
    demonstrated = printed(recorder, monkeypatch, {"time/step": 1.0, "loss/total": 2.0})
    assert demonstrated.splitlines()[0].split()[2:6] == ["loss", "2.0000", "1.0", "s"]
    evaluated = printed(recorder, monkeypatch, {"time/evaluate": 1.0, "evaluation/accuracy": 0.0})
    assert evaluated.splitlines()[0].endswith("evaluated in 1.0 s")


def test_a_step_line_has_the_share_of_cut_completions_once_there_are_any(recorder, monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream := io.StringIO())
    run = recorder(sinks=["console"], console_every=0)
    for step, share in enumerate((0.0, 0.125, 0.0), start=1):
        record_metric("train/accuracy", 1.0)
        record_metric("completions/clipped_fraction", share)
        run.flush(step)
    run.close()
    assert [re.findall(r"cut off +(\d+%)", line) for line in stream.getvalue().splitlines()] == [[], ["12%"], ["0%"]]


def test_the_panel_has_a_user_s_own_metrics_and_those_asked_for(recorder, monkeypatch):
    values = dict.fromkeys(("extra/right/characters", "mine/depth", "ratio/min", "ratio/unlisted"), 7.0)
    output = printed(recorder, monkeypatch, values, console_every=1, console_metrics=["ratio/min"])
    assert re.search(r"extra +right/characters=7", output)
    assert re.search(r"mine +depth=7", output)
    assert re.search(r"ratio +min=7", output)
    assert "unlisted" not in output


def test_every_documented_group_of_keys_is_known_to_the_panel():
    assert {key.partition("/")[0] for key in documented_keys()} - {"extra"} <= set(BUILT_IN_GROUPS)
