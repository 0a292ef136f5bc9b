"""The table of prompts in a browser."""

from tests.parts.report_page import at, clean
from tests.parts.report_runs import change_rows, write_run
from torchtitan_rl.observe.report import write_report


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
