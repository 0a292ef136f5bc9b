"""Samples beyond the size limit of a page in a browser."""

import json
import random

from tests.parts.report_page import at, clean
from tests.parts.report_runs import write_run
from torchtitan_rl.report import write_report


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
    assert "more samples do not fit this page" in browser.run("document.querySelector('main .note').innerText")
    assert browser.run("document.querySelector('tr.open .c-step').innerText") == "400"
    browser.run("document.querySelector('[data-split=eval_greedy]').click()")
    assert browser.run("document.querySelector('tr[data-row] .c-step').innerText") == "400"
    assert clean(browser), browser.errors
