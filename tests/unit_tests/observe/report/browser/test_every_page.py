"""All pages in a browser: they open at every width; hostile text does nothing."""

import json

import pytest

from tests.parts.report_page import at, clean, text
from tests.parts.report_runs import HOSTILE, change_rows, write_run
from torchtitan_rl.observe.report import write_report


@pytest.mark.parametrize(("width", "dark"), [(1400, True), (390, False)])
def test_every_view_opens_without_an_error_and_fits_the_window(browser, one, width, dark):
    browser.open(one[0], width=width, dark=dark)
    for view in ("overview", "samples", "prompts", "health"):
        browser.run(f"document.querySelector('nav [data-view={view}]').click()")
        browser.wait(f"document.querySelector('main').dataset.view === '{view}'")
        assert browser.run("document.querySelector('main').innerText.length") > 50, view
        assert browser.run("document.documentElement.scrollWidth") <= width, view
    back = browser.run("getComputedStyle(document.body).backgroundColor")
    assert back == ("rgb(18, 22, 28)" if dark else "rgb(246, 247, 249)")
    assert clean(browser), browser.errors


def test_hostile_samples_do_nothing_and_are_shown_as_they_are(browser, tmp_path):
    folder = write_run(tmp_path / "b<img src=x>", steps=3, text=HOSTILE)
    hostile = {"prompt": HOSTILE, "split": HOSTILE, "finish_reason": HOSTILE, "select_reason": HOSTILE, f"extra/{HOSTILE}": HOSTILE,
                f"reward/{HOSTILE}": 1.0, "messages": [{"role": HOSTILE, "content": HOSTILE}], "answer": HOSTILE, "left_out": HOSTILE}  # fmt: skip
    change_rows(folder, lambda row: row.update(hostile))
    (folder / "logs" / "rank_0.log").write_text(
        f"2026-11-21 12:00:00,000 ERROR root: {HOSTILE}\n".replace("\ud800", ""), "utf-8"
    )
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 4, HOSTILE: 1.0, "reward/mean": 1.0}) + "\n")
    (folder / "config.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    write_report(folder, tmp_path / "r.html")
    for state in ({"series": "script"}, {"view": "samples"}, {"view": "samples", "tab": "siblings"},
                  {"view": "samples", "tab": "history"}, {"view": "health"}):  # fmt: skip
        browser.open(at(tmp_path / "r.html", **state))
        assert browser.run("window.hacked") is None
        assert browser.run("document.querySelectorAll('main img, main svg, main script, main iframe').length") == 0
        assert clean(browser), browser.errors
    assert "</script><script>" in text(browser, "[data-table=warnings]")
    assert text(browser, ".alarm") == "1"
    browser.open(at(tmp_path / "r.html", view="samples", q="javascript:alert", open="train/1/0/0"))
    shown = text(browser, ".detail")
    assert "</script><script>window.hacked = 1</script><img src=x" in shown
    assert "\u241b[31m\u2400" in shown  # control characters as signs
    assert "[U+202E]gnp.exe" in shown


def test_prompts_are_listed_by_their_pass_rate(browser, tmp_path):
    folder = write_run(tmp_path / "a", steps=2, siblings=1)
    right = {0: (False, False), 1: (True, True), 2: (False, True), 3: (True, False)}
    change_rows(
        folder, lambda r: r.update(prompt=f"prompt {r['prompt_idx']}", correct=right[r["prompt_idx"]][r["step"] - 1])
    )
    write_report(folder, tmp_path / "r.html")
    browser.open(at(tmp_path / "r.html", view="prompts"))
    kinds = browser.run(
        "[...document.querySelectorAll('[data-table=prompts] tbody tr')].map(r => [r.children[0].innerText, r.children[1].innerText])"
    )
    assert sorted(kinds) == [["prompt 0", "stuck"], ["prompt 1", "solved"], ["prompt 2", "up"], ["prompt 3", "down"]]
    browser.run("document.querySelector('[data-table=prompts] button').click()")
    assert browser.run("document.querySelector('main').dataset.view") == "samples"
    assert clean(browser), browser.errors
