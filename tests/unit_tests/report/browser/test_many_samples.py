"""Samples beyond the size limit of a page, and very many samples, in a browser."""

import json
import random
import re

import pytest

from tests.parts.report_page import ROWS_OF_A_PAGE, at, clean
from tests.parts.report_runs import row_of, write_run
from torchtitan_rl.report import Run, write_report
from torchtitan_rl.report.page import render

LARGE = {"steps": 40, "prompts": 40, "text": "word " * 400}
TOTAL = 40 * 40 * 4


def test_samples_beyond_the_size_are_loaded_when_they_are_asked_for(browser, tmp_path):
    run = write_report([write_run(tmp_path / "a", **LARGE)], tmp_path / "r.html", size_mb=0.9)[0]
    browser.open(at(tmp_path / "r.html", view="samples", sort="step", down=False))
    count = "document.querySelector('.count').innerText"
    assert int(re.match(r"[0-9,]+", browser.run(count))[0].replace(",", "")) < TOTAL
    assert "more samples are in r.samples.js" in browser.run("document.querySelector('main .note').innerText")
    browser.run("document.querySelector('[data-more]').click()")
    browser.wait(f"{count} === '{TOTAL:,} samples'")
    assert browser.run("document.querySelector('[data-more]')") is None
    assert clean(browser), browser.errors
    expected = sum(row["prompt_idx"] == 7 and row["correct"] for row in run.rows)
    browser.open(at(tmp_path / "r.html", view="samples", q="what is 73", right="right", more=True))  # as after a reload
    browser.wait(f"{count}.startsWith('{expected} samples of {TOTAL:,}')")
    assert clean(browser), browser.errors


def test_a_small_page_of_a_long_run_has_the_newest_samples_and_the_last_evaluation(browser, tmp_path):
    folder = write_run(tmp_path / "a", steps=400, prompts=1, siblings=1, text="word " * 1500)
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for row in rows:
        row["select_reason"] = "random"
        row["response"] += str(random.Random(row["step"]).random())
    held_out = [
        row | {"split": "eval_greedy", "episode_id": f"eval_greedy/{row['step']}/0/0"} for row in rows[199::200]
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows + held_out))
    write_report([folder], tmp_path / "r.html", size_mb=0.8)
    browser.open(at(tmp_path / "r.html", view="samples"))
    assert "more samples are in r.samples.js" in browser.run("document.querySelector('main .note').innerText")
    assert browser.run("document.querySelector('tr.open .c-step').innerText") == "400"
    browser.run("document.querySelector('[data-split=eval_greedy]').click()")
    assert browser.run("document.querySelector('tr[data-row] .c-step').innerText") == "400"
    assert clean(browser), browser.errors


@pytest.mark.parametrize("fault", ["missing", "of another page"])
def test_a_second_file_that_is_missing_or_of_another_page_is_said(browser, tmp_path, fault):
    page = tmp_path / "r.html"
    write_report([write_run(tmp_path / "a", **LARGE)], page, size_mb=0.9)
    second = tmp_path / "r.samples.js"
    if fault == "missing":
        second.unlink()
    else:
        second.write_text(re.sub(r"^torchtitanRows\(\"\w+", 'torchtitanRows("0', second.read_text()))
    browser.open(at(page, view="samples"))
    browser.run("document.querySelector('[data-more]').click()")
    browser.wait("document.querySelector('.failed').innerText !== ''")
    said = browser.run("document.querySelector('.failed').innerText")
    assert ("is not beside this page" if fault == "missing" else "belongs to another version of this page") in said
    assert browser.run("document.querySelectorAll('tr[data-row]').length") == ROWS_OF_A_PAGE
    assert not browser.run("document.querySelector('[data-more]').disabled")


@pytest.mark.long
def test_100k_rows_stay_usable(browser, tmp_path):
    chance = random.Random(0)
    rows = [row_of(step, p, s, 8, chance, None) for step in range(250) for p in range(50) for s in range(8)]
    (tmp_path / "r.html").write_text(render([Run(name="large", folder=tmp_path, rows=rows)], size_mb=100)[0], "utf-8")
    browser.open(at(tmp_path / "r.html", view="samples"))
    assert browser.run("document.querySelector('.count').innerText") == "100,000 samples"
    sort = "(() => { const t = performance.now(); document.querySelector('[data-sort=reward]').click(); return performance.now() - t; })()"
    assert browser.run(sort) < 3_000  # ms, on a busy machine
    assert browser.run("document.querySelectorAll('tr[data-row]').length") == ROWS_OF_A_PAGE
    assert clean(browser), browser.errors
