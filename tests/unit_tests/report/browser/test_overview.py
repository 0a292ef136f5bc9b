"""The overview in a browser: verdicts, charts, and how a run ended."""

import json
import re

import pytest

from tests.parts.report_page import at, clean
from tests.parts.report_runs import write_run
from torchtitan_rl.report import write_report
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
    write_end(folder, "failed", error, code=1, rank=1, phase="step 6: grade", started_s={"start the vLLM engine": 30.0})
    write_report([folder], tmp_path / "r.html")
    browser.open(tmp_path / "r.html", height=900)
    said = browser.run("document.querySelector('.ending').innerText")
    assert said.startswith("Failed in step 6, grade (rank 1): 5 of 50 steps")
    assert "ZeroDivisionError: division by zero" in said
    assert browser.run("document.querySelector('.ending').getBoundingClientRect().bottom") < 900
    where = browser.run("document.querySelector('[data-chart=\"Where time went\"]').innerText")
    assert "start the vLLM engine" in where
    shares = [float(share) for share in re.findall(r"([0-9.]+) %", where)]
    assert sum(shares) == pytest.approx(100, abs=0.3)
    assert clean(browser), browser.errors


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
