"""A link shows its sample whatever has become of the run since, and the browser's Back leads where the reader was."""

import json
import random
from urllib.parse import quote

from tests.parts.report_page import at, clean, text
from tests.parts.report_runs import write_run
from torchtitan_rl.observe.report import write_report

LARGE = {"prompts": 40, "text": "word " * 400}
"""Its samples do not fit into a page of 0.9 MB."""


def words_of(name: str) -> str:
    """How the header of the sample with this name begins. Example: "step 3 · train · prompt 1 · sample 2 of 4"."""
    split, step, prompt, sample = name.split("/")
    return f"step {step} · {split} · prompt {prompt} · sample {sample} of 4"


def follow(browser, **state) -> None:
    """Goes to another address of the open page, as a click on a link does."""
    browser.run(f"location.hash = '#' + {json.dumps(quote(json.dumps({'view': 'samples', **state})))}")


def test_links_survive_growth(browser, tmp_path):
    chance = random.Random(0)
    page = tmp_path / "r.html"
    rows = write_report(write_run(tmp_path / "small", steps=20, **LARGE), page, size_mb=100).rows
    names = [row["episode_id"] for row in chance.sample(rows, 30)]
    grown = write_run(tmp_path / "grown", steps=40, **LARGE)
    write_report(grown, page, size_mb=100)
    browser.open(at(page, view="samples", open=names[0]))
    for place, name in enumerate(names):
        follow(browser, open=name)
        if place % 10 == 9:  # as the browser reloads it: at its own address
            browser.open(browser.run("location.href"))
        browser.wait(f"document.querySelector('.detail .facts')?.innerText.startsWith({json.dumps(words_of(name))})")
        assert text(browser, "tr.open .c-step") == name.split("/")[1]
    assert clean(browser), browser.errors


def test_a_link_to_a_sample_that_is_not_there_says_so_and_how_to_get_it(browser, tmp_path, one):
    browser.open(at(one[0], view="samples", open="train/77/0/0"))
    said = text(browser, ".detail")
    assert "train/77/0/0, is not in this page" in said
    assert "metrics.keep_all_rows" in said
    assert "train/77/0/0" in browser.run("decodeURIComponent(location.hash)")  # kept, for when the run has gone on
    page = tmp_path / "r.html"
    rows = write_report(write_run(tmp_path / "a", steps=40, **LARGE), page, size_mb=0.9).rows
    for row in rows[::-97]:
        browser.open(at(page, view="samples", open=row["episode_id"]))
        if "is not in this page" in text(browser, ".detail"):
            break
    assert "It may not fit: write the page with a larger --size" in text(browser, ".detail")
