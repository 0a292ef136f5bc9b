"""The overview in a browser: lines, charts, and how a run ended."""

import json
import random

from tests.parts.report_page import clean, text
from tests.parts.report_runs import row_of, write_run
from torchtitan_rl.observe.report import load_run, write_report
from torchtitan_rl.observe.report.overview import lines
from torchtitan_rl.run.run_end import write_end


def test_the_overview_has_the_lines_and_draws_the_curves(browser, one):
    page, _ = one
    browser.open(page)
    assert "reward 0.4" in text(browser, ".lines")
    titles = browser.run("[...document.querySelectorAll('figure[data-chart]')].map(f => f.dataset.chart)")
    assert {"Reward", "Held-out accuracy", "Entropy", "Gradient norm", "Time of a step"} <= set(titles)
    assert "mine/length" in titles  # a reward function logs it
    assert "KL" not in titles  # this run has none
    browser.wait("document.querySelectorAll('canvas').length >= 6")
    painted = "[...document.querySelector('canvas').getContext('2d').getImageData(0, 0, 300, 150).data].some(v => v)"
    assert browser.run(painted)


def test_a_failed_run_is_understood_from_the_first_screen(browser, tmp_path):
    folder = write_run(tmp_path / "a", steps=5, num_steps=50)
    error = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    g()\nZeroDivisionError: division by zero\n'
    write_end(folder, "failed", error, code=1, rank=1, phase="step 6: grade")
    write_report(folder, tmp_path / "r.html")
    browser.open(tmp_path / "r.html", height=900)
    said = text(browser, ".ending")
    assert said.startswith("Failed in step 6, grade (rank 1): 5 of 50 steps")
    assert "ZeroDivisionError: division by zero" in said
    assert browser.run("document.querySelector('.ending').getBoundingClientRect().bottom") < 900
    assert clean(browser), browser.errors


def test_the_step_that_failed_leads_to_its_samples(browser, tmp_path):
    folder = write_run(tmp_path / "a", steps=5, num_steps=50)
    before = load_run(folder)
    drafted = {"unfinished": True, "reward": None, "correct": None, "advantage": None, "left_out": "its step failed"}
    rows = [row_of(6, p, i, 4, random.Random(0), "as far as it came") | drafted for p in range(3) for i in range(4)]
    (folder / "samples.unfinished.jsonl").write_text("\n".join(map(json.dumps, rows)) + " \n")
    assert lines(load_run(folder)) == lines(before)  # they are in no line
    write_end(folder, "failed", "KeyError: furlong", code=1, rank=0, phase="step 6: grade")
    write_report(folder, tmp_path / "r.html")
    browser.open(tmp_path / "r.html")
    assert "12 samples of step 6, as far as they came" in text(browser, ".ending")
    browser.run("document.querySelector('[data-failed]').click()")
    assert browser.run("document.querySelectorAll('tr[data-row]').length") == 12
    assert "not in the loss: its step failed" in text(browser, ".detail")
    browser.run("history.back()")
    browser.wait("document.querySelector('main').dataset.view === 'overview'")
    assert clean(browser), browser.errors


def test_a_measurement_has_the_step_at_which_it_was_made(browser, one):
    browser.open(one[0])  # evaluated at steps 0, 4, 8 and 12
    chart = "document.querySelector('[data-chart=\"Held-out accuracy\"]')"
    browser.run(f"{chart}.scrollIntoView()")
    browser.wait(f"{chart}.querySelector('canvas') !== null")
    for step, expected in ((3, ["25.0 %, step 0"]), (4, ["41.7 %"])):
        browser.run(
            f"(p => p.setCursor({{ left: p.valToPos({step}, 'x'), top: 10 }}))({chart}.querySelector('.plot').plot)"
        )
        browser.wait(f"{chart}.querySelector('.where').innerText === 'step {step}'")
        assert browser.run(f"[...{chart}.querySelectorAll('.key b')].map(e => e.innerText)") == expected
