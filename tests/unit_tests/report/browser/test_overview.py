"""The overview in a browser: verdicts, charts, and how a run ended."""

import json
import os
import random
import re

import pytest

from tests.parts.report_page import at, clean
from tests.parts.report_runs import row_of, write_run
from torchtitan_rl.report import load_run, write_report
from torchtitan_rl.report.health import health
from torchtitan_rl.report.load import unbiased_rows
from torchtitan_rl.report.verdicts import verdicts
from torchtitan_rl.resilience.run_end import write_end


def test_the_overview_has_the_verdicts_and_draws_the_curves(browser, one):
    page, _ = one
    browser.open(page)
    assert "reward rose from" in browser.run("document.querySelector('.verdicts').innerText")
    titles = browser.run("[...document.querySelectorAll('figure[data-chart]')].map(f => f.dataset.chart)")
    assert {"Reward", "Held-out accuracy", "Entropy", "Gradient norm", "Time of a step"} <= set(titles)
    assert "KL" not in titles  # this run has none
    browser.wait("document.querySelectorAll('canvas').length >= 6")
    painted = "[...document.querySelector('canvas').getContext('2d').getImageData(0, 0, 300, 150).data].some(v => v)"
    assert browser.run(painted)


def test_series_are_found_by_a_part_of_their_name(browser, one):
    page, run = one
    browser.open(at(page, series="logprob_diff"))
    titles = browser.run("[...document.querySelectorAll('.grid:last-child figure')].map(f => f.dataset.chart)")
    assert titles == sorted(key for key in run.series if "logprob_diff" in key)


def test_smoothing_log_scale_and_hidden_runs_redraw(browser, two):
    browser.open(at(two[0], smooth=0.8, log=True))
    browser.run("document.querySelector('.chip[aria-pressed=true]').click()")
    browser.wait("location.hash.includes('hidden')")
    reward = "document.querySelector('[data-chart=Reward]').innerText"
    assert "b" in browser.run(reward)
    assert clean(browser), browser.errors


def test_a_failed_run_is_understood_from_the_first_screen(browser, tmp_path):
    folder = write_run(tmp_path / "a", steps=5, num_steps=50)
    error = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    g()\nZeroDivisionError: division by zero\n'
    write_end(folder, "failed", error, code=1, rank=1, phase="step 6: grade")
    write_report([folder], tmp_path / "r.html")
    browser.open(tmp_path / "r.html", height=900)
    said = browser.run("document.querySelector('.ending').innerText")
    assert said.startswith("Failed in step 6, grade (rank 1): 5 of 50 steps")
    assert "ZeroDivisionError: division by zero" in said
    assert browser.run("document.querySelector('.ending').getBoundingClientRect().bottom") < 900
    where = browser.run("document.querySelector('[data-chart=\"Where time went\"]').innerText")
    shares = [float(share) for share in re.findall(r"([0-9.]+) %", where)]
    assert sum(shares) == pytest.approx(100, abs=0.3)
    assert clean(browser), browser.errors


def test_a_live_run_says_its_step_and_the_time_left(browser, tmp_path):
    folder = write_run(tmp_path / "a", steps=7, num_steps=50)
    write_report([folder], tmp_path / "r.html")
    browser.open(tmp_path / "r.html")
    said = browser.run("document.querySelector('.ending').innerText")
    assert said.startswith("Running: step 7 of 50, about 1 min 26 s left, the last at ")
    old = 1.7e9
    for path in folder.rglob("*"):
        os.utime(path, (old, old))
    write_report([folder], tmp_path / "r.html")
    browser.open(tmp_path / "r.html")
    assert "its files have stopped growing" in browser.run("document.querySelector('.ending').innerText")


def test_a_run_of_conversations_has_a_chart_of_its_tool_calls(browser, tmp_path):
    folder = write_run(tmp_path / "a", steps=6)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        line |= {
            "conversations/turns/mean": 2.0 + line["step"],
            "conversations/tool_calls": 1.0,
            "conversations/tool_errors": 0.5,
        }
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report([folder], tmp_path / "r.html")
    browser.open(tmp_path / "r.html")
    assert "tool calls per conversation 1 → 1; of them failed 50 % → 50 %" in browser.run(
        "document.querySelector('.verdicts').innerText"
    )
    chart = browser.run("document.querySelector('[data-chart=Conversations]').innerText")
    assert all(word in chart for word in ("turns", "tool calls", "tool errors"))
    assert clean(browser), browser.errors


def test_a_mixture_of_experts_has_a_chart_and_a_line_of_their_load(browser, tmp_path):
    folder = write_run(tmp_path / "a", steps=6)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        line |= {"moe/largest_load": 1.5 + 0.5 * line["step"], "moe/dead_experts": float(line["step"] > 3)}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report([folder], tmp_path / "r.html")
    browser.open(tmp_path / "r.html")
    assert "the busiest expert of a layer takes 2 → 4.5 times the mean" in browser.run(
        "document.querySelector('.verdicts').innerText"
    )
    chart = browser.run("document.querySelector('[data-chart=Experts]').innerText")
    assert all(word in chart for word in ("busiest / mean", "4.5", "without a token"))
    assert clean(browser), browser.errors


def unfinished_rows(folder, step, prompts=3, siblings=4):
    """Writes the samples of a step that failed while it was graded."""
    rows = [
        row_of(step, p, i, siblings, random.Random(0), "as far as it came")
        for p in range(prompts)
        for i in range(siblings)
    ]
    for row in rows:
        row |= {
            "unfinished": True,
            "reward": None,
            "correct": None,
            "advantage": None,
            "in_loss": False,
            "left_out": "its step failed",
        }
    (folder / "samples.unfinished.jsonl").write_text("\n".join(map(json.dumps, rows)) + " \n")


def test_the_step_that_failed_leads_to_its_samples(browser, tmp_path):
    folder = write_run(tmp_path / "a", steps=5, num_steps=50)
    unfinished_rows(folder, step=6)
    write_end(folder, "failed", "KeyError: furlong", code=1, rank=0, phase="step 6: grade")
    write_report([folder], tmp_path / "r.html")
    browser.open(tmp_path / "r.html")
    assert "12 samples of step 6, as far as they came" in browser.run("document.querySelector('.ending').innerText")
    browser.run("document.querySelector('[data-failed]').click()")
    assert browser.run("document.querySelectorAll('tr[data-row]').length") == 12
    assert "not in the loss: its step failed" in browser.run("document.querySelector('.detail').innerText")
    browser.run("history.back()")
    browser.wait("document.querySelector('main').dataset.view === 'overview'")
    assert clean(browser), browser.errors


def test_samples_of_a_failed_step_change_no_verdict_and_no_comparison(tmp_path):
    folder = write_run(tmp_path / "a", steps=5, num_steps=50)
    before = load_run(folder)
    verdicts_before, health_before = verdicts(before), health(before)
    unfinished_rows(folder, step=6)
    after = load_run(folder)
    assert len(after.rows) == len(before.rows) + 12
    assert (verdicts(after), unbiased_rows(after)) == (verdicts_before, unbiased_rows(before))
    assert health(after) == health_before


def test_charts_of_the_run_s_config_stand_beside_the_page_s_own(browser, tmp_path):
    charts = ["Loss and length=loss/total,completions/length/mean", "Not logged=my/metric"]
    write_report([write_run(tmp_path / "a", metrics={"charts": charts})], tmp_path / "r.html")
    browser.open(tmp_path / "r.html")
    titles = browser.run("[...document.querySelectorAll('[data-chart]')].map(one => one.dataset.chart)")
    assert "Loss and length" in titles
    assert "Not logged" not in titles
    assert clean(browser), browser.errors
