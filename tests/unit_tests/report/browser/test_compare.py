"""Two runs compared in a browser: at equal steps, on the same prompts."""

import random
import zlib
from dataclasses import replace
from statistics import fmean

import pytest

from tests.parts.report_page import at
from tests.parts.report_runs import write_run
from torchtitan_rl.report import load_run, write_report
from torchtitan_rl.report.page import render


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
    [accuracy] = [line for line in cells if line[0].startswith("Held-out accuracy")]
    expected = [f"{100 * run.series['evaluation/accuracy'][run.steps.index(8)]:.1f} %" for run in (a, b)]
    assert accuracy == ["Held-out accuracy step 8", *expected]  # not step 12 of one and step 8 of the other
    sides = browser.run(
        "[...document.querySelectorAll('.pair .history > .facts')].map(e => e.innerText.split('step ')[1])"
    )
    assert len(sides) == 2
    assert sides[0] == sides[1]


OUTCOMES = (
    "[...document.querySelectorAll('[data-table=outcomes] tbody tr')].map(r => [...r.children].map(c => c.innerText))"
)


def labelled(rows):
    """The rows with the reasons that `top:1 bottom:1 random:1` would give them."""
    steps = {}
    for row in rows:
        steps.setdefault(row["step"], []).append({**row, "select_reason": ""})
    for members in steps.values():
        ranked = sorted(members, key=lambda row: row["reward"])
        for row, reason in ((ranked[0], "bottom"), (ranked[-1], "top"), (members[zlib.crc32(b"r") % 16], "random")):
            row["select_reason"] = ", ".join(filter(None, [row["select_reason"], reason]))
    return [row for members in steps.values() for row in members]


def copy_of(run, name, rows):
    """The run with only these of its rows."""
    return replace(run, name=name, rows=[dict(row) for row in rows])


def subset_of(rows, chance):
    """Some of the rows: the selected ones, the best ones, or any."""
    kind, share = chance.choice(["selected", "right", "any"]), chance.uniform(0.1, 1.0)
    if kind == "selected":
        return [row for row in rows if row["select_reason"]]
    return [row for row in rows if chance.random() < share * (1.0 if kind == "any" or row["correct"] else 0.2)]


@pytest.mark.parametrize("pages", [2, pytest.param(10, marks=pytest.mark.long)])
def test_a_run_never_differs_from_20_subsets_a_page_of_its_own_rows(browser, tmp_path, pages):
    chance = random.Random(0)
    whole = load_run(write_run(tmp_path / "a", steps=8))
    whole.rows = labelled(whole.rows)
    told = 0
    for _ in range(pages):
        copies = [copy_of(whole, f"copy {i}", subset_of(whole.rows, chance)) for i in range(20)]
        (tmp_path / "r.html").write_text(render([whole, *copies], size_mb=100), "utf-8")
        browser.open(at(tmp_path / "r.html", view="compare"))
        for b in range(1, 21):
            browser.run(
                f"(e => {{ e.value = '{b}'; e.dispatchEvent(new Event('change')); }})(document.querySelector('[data-field=b]'))"
            )
            for _, prompts, better, worse, equal, right_a, right_b, p, _ in browser.run(OUTCOMES):
                told += 1
                assert (better, worse, equal, p) == ("0", "0", prompts, "1")
                assert right_a == right_b
    assert told > 15 * pages  # a few copies have only selected rows of other prompts


def test_selected_rows_are_compared_by_the_random_ones_alone(browser, tmp_path):
    whole = load_run(write_run(tmp_path / "a", steps=12))
    whole.rows = labelled(whole.rows)
    selected = copy_of(whole, "selected", [row for row in whole.rows if row["select_reason"]])
    worst = copy_of(whole, "worst", [row for row in whole.rows if row["select_reason"] == "bottom"])
    drawn = [row["correct"] for row in whole.rows if "random" in row["select_reason"]]
    (tmp_path / "r.html").write_text(render([whole, selected, worst]), "utf-8")
    browser.open(at(tmp_path / "r.html", view="compare"))
    [line] = browser.run(OUTCOMES)
    share = f"{100 * sum(drawn) / len(drawn):.1f} %"
    assert line == ["train", "12", "0", "0", "12", share, share, "1", "12"]
    browser.open(at(tmp_path / "r.html", view="compare", b=2))
    assert browser.run(OUTCOMES) == []
    assert "train: none can be compared" in browser.run("document.querySelector('main').innerText")


def test_runs_of_different_tasks_have_no_verdict(browser, tmp_path):
    folders = [write_run(tmp_path / f"{n}", steps=4, seed=n, task={"max_integers": n}) for n in (2, 3)]
    write_report(folders, tmp_path / "r.html")
    browser.open(at(tmp_path / "r.html", view="compare"))
    assert browser.run(OUTCOMES) == []
    assert "The tasks differ (task.max_integers)" in browser.run("document.querySelector('[role=alert]').innerText")


def test_logged_metrics_are_paired_over_the_steps_of_both(browser, two):
    page, (a, b) = two
    browser.open(at(page, view="compare"))
    lines = browser.run(
        "[...document.querySelectorAll('[data-table=paired] tbody tr')].map(r => [...r.children].map(c => c.innerText))"
    )
    [reward] = [line for line in lines if line[0] == "Reward"]
    x, y = (run.series["reward/mean"][1:9] for run in (a, b))
    higher = [sum(p > q for p, q in zip(x, y)), sum(q > p for p, q in zip(x, y))]
    assert reward[1:4] == ["8", f"{fmean(x):.3g}", f"{fmean(y):.3g}"]
    assert reward[5:] == [str(count) for count in higher]
