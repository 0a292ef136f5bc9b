"""Samples beyond the size limit of a page, and very many samples, in a browser."""

import re

import pytest

from tests.parts.report_page import ROWS_OF_A_PAGE, at, clean
from tests.parts.report_runs import write_run
from torchtitan_rl.report import write_report

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
