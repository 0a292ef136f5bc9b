"""The health page in a browser."""

import json
import random

from tests.parts.report_page import at
from tests.parts.report_runs import metrics_of, write_run
from torchtitan_rl.report import load_run, write_report


def test_the_health_page_lists_warnings_and_counts(browser, tmp_path):
    folder = write_run(tmp_path / "a", steps=3)
    (folder / "logs" / "rank_0.log").write_text("2026-11-21 12:00:00,000 ERROR root: the sink died\n")
    line = metrics_of(4, 4, random.Random(0)) | {"obs/dropped_rows": 7.0, "reward/mine/failures": 2.0}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    write_report(folder, tmp_path / "r.html")
    browser.open(at(tmp_path / "r.html", view="health"))
    assert "the sink died" in browser.run("document.querySelector('[data-table=warnings]').innerText")
    counts = browser.run(
        "[...document.querySelectorAll('[data-table=counts] tbody tr')].map(e => e.innerText.split(/\\s+/))"
    )
    assert counts == [["obs/dropped_rows", "7", "4"], ["reward/mine/failures", "2", "4"]]
    assert browser.run("document.querySelector('.alarm').innerText") == "3"
    assert load_run(folder).warnings[0].level == "ERROR"
