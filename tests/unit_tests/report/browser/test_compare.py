"""Two runs compared in a browser: at equal steps, on the same prompts."""

import json

from tests.parts.report_page import at
from tests.parts.report_runs import write_run
from torchtitan_rl.report import write_report


def test_two_runs_are_compared_on_the_same_prompts(browser, two):
    page, (a, b) = two
    browser.open(at(page, view="compare", when="3"))
    cells = browser.run("[...document.querySelectorAll('[data-table=outcomes] tbody td')].map(e => e.innerText)")
    share = [
        {p: [r["correct"] for r in run.rows if (r["step"], r["prompt_idx"]) == (3, p)] for p in range(4)}
        for run in (a, b)
    ]
    won = sum(sum(share[1][p]) > sum(share[0][p]) for p in range(4))
    lost = sum(sum(share[1][p]) < sum(share[0][p]) for p in range(4))
    assert cells[:5] == ["train", "4", str(won), str(lost), str(4 - won - lost)]
    settings = browser.run(
        "[...document.querySelectorAll('[data-table=config] tbody td:first-child')].map(e => e.innerText)"
    )
    assert settings == ["algorithm.kl.coef", "num_steps", "seed"]


def test_runs_are_compared_at_the_last_step_that_all_have(browser, two):
    page, (a, b) = two
    browser.open(at(page, view="compare"))
    cells = browser.run(
        "[...document.querySelectorAll('[data-table=final] tbody tr')].map(r => [...r.children].map(c => c.innerText))"
    )
    [accuracy] = [line for line in cells if line[0] == "Held-out accuracy"]
    expected = [f"{100 * run.series['evaluation/accuracy'][run.steps.index(8)]:.1f} %" for run in (a, b)]
    assert accuracy == ["Held-out accuracy", "step 8", *expected]  # not step 12 of one and step 8 of the other
    sides = browser.run(
        "[...document.querySelectorAll('.pair .history > .facts')].map(e => e.innerText.split('step ')[1])"
    )
    assert len(sides) == 2
    assert sides[0] == sides[1]


def test_a_phone_shows_the_columns_of_both_runs(browser, tmp_path):
    folders = [
        write_run(tmp_path / name, steps=8, seed=seed)
        for seed, name in enumerate(["a_run_with_a_long_name_20261123", "another"])
    ]
    for place, folder in enumerate(folders):
        (folder / "environment.json").write_text(json.dumps({"code": {"commit": f"{place}" * 40}}))
    write_report(folders, tmp_path / "r.html")
    browser.open(at(tmp_path / "r.html", view="compare"), width=390)
    for name in ("final", "config"):
        hidden = browser.run(
            f"(e => e.scrollWidth - e.clientWidth)(document.querySelector('[data-table={name}]').parentNode)"
        )
        assert hidden <= 0, name
