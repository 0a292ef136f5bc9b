"""The report in a real browser: every view opens, the table shows the rows that Python says, hostile text does nothing."""

import json
import random
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.parts.browser import CHROMIUM, MISSING, Browser
from tests.parts.report_runs import HOSTILE, metrics_of, row_of, write_run
from torchtitan_rl.report import Run, load_run, write_report
from torchtitan_rl.report.page import render

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)

PAGE = 50


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """One browser for all tests here."""
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A report of one run, and the run."""
    folder = tmp_path_factory.mktemp("one")
    run = write_report([write_run(folder / "a", steps=12)], folder / "r.html")[0]
    return folder / "r.html", run


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A report of two runs, and the runs."""
    folder = tmp_path_factory.mktemp("two")
    other = write_run(folder / "b", steps=8, seed=1, algorithm={"kl": {"coef": 0.01}})
    return folder / "r.html", write_report([write_run(folder / "a", steps=12), other], folder / "r.html")


def at(page: Path, **state) -> str:
    """The address of the page with this state."""
    return page.resolve().as_uri() + "#" + quote(json.dumps(state))


def shown(browser: Browser) -> list[int]:
    """The row numbers of the table, over all its pages."""
    found = []
    while True:
        found += browser.run("[...document.querySelectorAll('tr[data-row]')].map(tr => Number(tr.dataset.row))")
        if browser.run("document.querySelector('[aria-label=\"next page\"]')?.disabled ?? true"):
            return found
        browser.run("document.querySelector('[aria-label=\"next page\"]').click()")


def clean(browser: Browser) -> bool:
    """Whether the console stayed silent and nothing was asked of a network."""
    return browser.errors == [] and all(url.startswith(("file:", "data:")) for url in browser.requests)


@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_every_view_opens_without_an_error_and_fits_the_window(browser, one, two, width, dark):
    for page in (one[0], two[0]):
        browser.open(page, width=width, dark=dark)
        for view in ("overview", "samples", "compare", "health"):
            browser.run(f"document.querySelector('nav [data-view={view}]').click()")
            browser.wait(f"document.querySelector('main').dataset.view === '{view}'")
            assert browser.run("document.querySelector('main').innerText.length") > 50, view
            assert browser.run("document.documentElement.scrollWidth") <= width, view
        assert browser.run("document.documentElement.dataset.theme") == ("dark" if dark else "light")
        assert clean(browser), browser.errors


def test_the_overview_has_the_verdicts_and_draws_the_curves(browser, one):
    page, _ = one
    browser.open(page)
    assert "reward rose from" in browser.run("document.querySelector('.verdicts').innerText")
    titles = browser.run("[...document.querySelectorAll('figure[data-chart]')].map(f => f.dataset.chart)")
    assert {"Reward", "Held-out accuracy", "Entropy", "Gradient norm", "Time of a step"} <= set(titles)
    assert "KL" not in titles  # this run has none
    browser.wait("document.querySelectorAll('canvas').length >= 6")
    painted = "[...document.querySelector('canvas').getContext('2d').getImageData(0, 0, 300, 150).data].some(v => v)"
    assert browser.run(painted)


def test_series_are_found_by_a_part_of_their_name(browser, one):
    page, run = one
    browser.open(at(page, series="logprob_diff"))
    titles = browser.run("[...document.querySelectorAll('.grid:last-child figure')].map(f => f.dataset.chart)")
    assert titles == sorted(key for key in run.series if "logprob_diff" in key)


def test_smoothing_log_scale_and_hidden_runs_redraw(browser, two):
    browser.open(at(two[0], smooth=0.8, log=True))
    browser.run("document.querySelector('.chip[aria-pressed=true]').click()")
    browser.wait("location.hash.includes('hidden')")
    reward = "document.querySelector('[data-chart=Reward]').innerText"
    assert "b" in browser.run(reward)
    assert clean(browser), browser.errors


FILTERS = [
    ({"split": "train", "right": "wrong"}, lambda r: not r["correct"]),
    ({"from": "3", "to": "5"}, lambda r: 3 <= r["step"] <= 5),
    ({"low": "0", "finish": "length"}, lambda r: r["reward"] >= 0 and r["finish_reason"] == "length"),
    ({"q": "MAKE [answer] 2"}, lambda r: "make [ANSWER] 2" in r["response"]),
    ({"shown": True}, lambda r: bool(r["select_reason"])),
    ({"high": "-0.8", "q": "what is 13"}, lambda r: r["reward"] <= -0.8 and "What is 13" in r["prompt"]),
    ({"q": "nowhere"}, lambda r: False),
]


@pytest.mark.parametrize(("state", "passes"), FILTERS)
def test_filters_show_the_rows_that_python_says(browser, one, state, passes):
    page, run = one
    browser.open(at(page, view="samples", sort="step", down=False, **state))
    assert shown(browser) == [i for i, row in enumerate(run.rows) if passes(row)]


@pytest.mark.parametrize("column", ["step", "reward", "correct", "response_tokens", "prompt", "advantage"])
@pytest.mark.parametrize("down", [False, True])
def test_sorts_give_the_order_that_python_says(browser, one, column, down):
    page, run = one
    browser.open(at(page, view="samples", sort=column, down=down, columns=["advantage"]))
    value = (
        (lambda i: str(run.rows[i][column]))
        if column in ("prompt", "correct")
        else (lambda i: float(f"{run.rows[i][column]:.6g}"))
    )
    order = sorted(
        range(len(run.rows)), key=value, reverse=down
    )  # Python's sort keeps equal ones in place, also reversed
    assert shown(browser) == order


def test_a_click_on_a_header_sorts_and_a_typed_word_filters(browser, one):
    page, run = one
    browser.open(at(page, view="samples"))
    browser.run("document.querySelector('[data-sort=reward]').click()")
    assert run.rows[shown(browser)[0]]["reward"] == 1.2
    browser.run(
        "{ const box = document.querySelector('[data-field=q]'); box.value = 'make [ANSWER] 5'; box.dispatchEvent(new Event('input')); }"
    )
    expected = sum("make [ANSWER] 5" in row["response"] for row in run.rows)
    browser.wait(f"document.querySelector('.count').innerText.startsWith('{expected} ')")


def test_j_and_k_go_through_the_samples_and_turn_the_page(browser, one):
    browser.open(at(one[0], view="samples", sort="step", down=False))
    opened = "Number(document.querySelector('tr.open').dataset.row)"
    assert browser.run(opened) == 0
    for _ in range(PAGE):
        browser.press("j")
    assert browser.run(opened) == PAGE
    assert browser.run("document.querySelector('.pager').innerText").find("page 2 of") > 0
    browser.press("k")
    assert browser.run(opened) == PAGE - 1


def test_siblings_come_best_first_with_their_difference_marked(browser, one):
    page, run = one
    browser.open(at(page, view="samples", sort="step", down=False, tab="siblings", open=0))
    order = browser.run("[...document.querySelectorAll('[data-sibling]')].map(e => Number(e.dataset.sibling))")
    assert order == sorted(range(4), key=lambda i: -run.rows[i]["reward"])
    marks = browser.run(
        "[...document.querySelectorAll('[data-sibling]')].map(e => [...e.querySelectorAll('mark')].map(m => m.innerText))"
    )
    best = run.rows[order[0]]["answer"]
    assert marks == [[] if run.rows[i]["answer"] == best else [run.rows[i]["answer"]] for i in order]


def test_one_prompt_is_followed_over_training(browser, tmp_path):
    folder = write_run(tmp_path / "a", steps=5)
    text = (folder / "samples.jsonl").read_text()
    (folder / "samples.jsonl").write_text(
        text.replace("What is 3 +", "What is 3 + 1?").replace("1? 1", "1?").replace("1? 2", "1?")
    )
    rows = [json.loads(line) for line in text.splitlines() if line]
    for row in rows:
        row["prompt"] = f"prompt {row['prompt_idx']}"
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report([folder], tmp_path / "r.html")
    browser.open(at(tmp_path / "r.html", view="samples", tab="history", open=0))
    steps = browser.run("[...document.querySelectorAll('[data-step]')].map(e => Number(e.dataset.step))")
    assert steps == [step for step in (1, 2, 3, 4, 5) for _ in range(4)]
    assert clean(browser), browser.errors


def test_hostile_samples_do_nothing_and_are_shown_as_they_are(browser, tmp_path):
    folder = write_run(tmp_path / "a", steps=3, text=HOSTILE)
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"prompt": HOSTILE, "split": HOSTILE, "finish_reason": HOSTILE, "select_reason": HOSTILE, f"extra/{HOSTILE}": HOSTILE,
                f"reward/{HOSTILE}": 1.0, "messages": [{"role": HOSTILE, "content": HOSTILE}], "answer": HOSTILE, "left_out": HOSTILE}  # fmt: skip
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "logs" / "rank_0.log").write_text(
        f"2026-11-21 12:00:00,000 WARNING root: {HOSTILE}\n".replace("\ud800", ""), "utf-8"
    )
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 4, HOSTILE: 1.0, "reward/mean": 1.0}) + "\n")
    (folder / "config.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    write_report([folder, write_run(tmp_path / "b<img src=x>", steps=3, text=HOSTILE)], tmp_path / "r.html")
    for state in ({"series": "script"}, {"view": "samples"}, {"view": "samples", "tab": "siblings"},
                  {"view": "samples", "tab": "history", "columns": [f"extra/{HOSTILE}"]}, {"view": "compare"}, {"view": "health"}):  # fmt: skip
        browser.open(at(tmp_path / "r.html", **state))
        assert browser.run("window.hacked") is None
        assert browser.run("document.querySelectorAll('main img, main svg, main script, main iframe').length") == 0
        assert clean(browser), browser.errors
    browser.open(at(tmp_path / "r.html", view="samples", q="javascript:alert", open=0))
    text = browser.run("document.querySelector('.detail').innerText")
    assert "</script><script>window.hacked = 1</script><img src=x" in text
    assert "\u241b[31m\u2400" in text  # control characters as signs
    assert "[U+202E]gnp.exe" in text


def test_a_long_answer_is_cut_until_it_is_asked_for(browser, tmp_path):
    write_report([write_run(tmp_path / "a", steps=2, text="word " * 20_000)], tmp_path / "r.html")
    browser.open(at(tmp_path / "r.html", view="samples", open=0))
    length = "document.querySelector('.detail').innerText.length"
    assert browser.run(length) < 8_000
    browser.run("document.querySelector('.more').click()")
    assert browser.run(length) > 19_000


def test_a_chat_is_shown_as_turns(browser, tmp_path):
    folder = write_run(tmp_path / "a", steps=1)
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "tool", "content": [1]},
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row | {"messages": messages}) + "\n" for row in rows))
    write_report([folder], tmp_path / "r.html")
    browser.open(at(tmp_path / "r.html", view="samples", open=0))
    roles = browser.run("[...document.querySelectorAll('.role')].map(e => e.innerText)")
    assert roles == ["system", "user", "tool", "assistant"]


def test_tokens_are_coloured_by_what_is_asked_for(browser, tmp_path):
    folder = write_run(tmp_path / "a", steps=1)
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    tokens = {"text": ["4", "<b>", "\n"], "logprob": [-0.01, -2.0, None], "diff": [0.0, 1e-5, None], "advantage": -1.5}
    (folder / "samples.jsonl").write_text("".join(json.dumps(row | {"tokens": tokens}) + "\n" for row in rows))
    write_report([folder], tmp_path / "r.html")
    browser.open(at(tmp_path / "r.html", view="samples", open=0))
    colours = "[...document.querySelectorAll('.token')].map(e => e.style.backgroundColor)"
    assert browser.run(colours) == []
    for paint, expected in (("logprob", (0.0, 65.0)), ("diff", (0.0, 65.0)), ("advantage", (65.0, 65.0))):
        browser.run(f"document.querySelector('[data-paint={paint}]').click()")
        shares = [
            float(colour.split(" ")[-2].removesuffix("%,")) if colour else None for colour in browser.run(colours)
        ]
        assert shares == [pytest.approx(expected[0], abs=1), pytest.approx(expected[1]), None]
    title = browser.run("document.querySelectorAll('.token')[1].title")
    assert title == '"<b>"\nlog-probability -2\ntrainer − sampler 1.0e-5\nadvantage -1.5'
    assert clean(browser), browser.errors


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


def test_the_health_page_lists_warnings_and_counts(browser, tmp_path):
    folder = write_run(tmp_path / "a", steps=3)
    (folder / "logs" / "rank_0.log").write_text("2026-11-21 12:00:00,000 ERROR root: the sink died\n")
    line = metrics_of(4, 4, random.Random(0)) | {"obs/dropped_rows": 7.0, "reward/mine/failures": 2.0}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    write_report([folder], tmp_path / "r.html")
    browser.open(at(tmp_path / "r.html", view="health"))
    assert "the sink died" in browser.run("document.querySelector('[data-table=warnings]').innerText")
    counts = browser.run(
        "[...document.querySelectorAll('[data-table=counts] tbody tr')].map(e => e.innerText.split(/\\s+/))"
    )
    assert counts == [["obs/dropped_rows", "7", "4"], ["reward/mine/failures", "2", "4"]]
    assert browser.run("document.querySelector('.alarm').innerText") == "3"
    assert load_run(folder).warnings[0].level == "ERROR"


def test_a_page_of_a_running_run_reads_itself_again_in_the_same_place(browser, tmp_path):
    folder, page = write_run(tmp_path / "a", steps=12, num_steps=50), tmp_path / "r.html"
    write_report([folder], page, refresh_s=0.5)
    browser.open(at(page, view="samples", q="make", sort="reward"), height=500)
    browser.run("document.querySelector('.list').scrollTop = 120; document.querySelectorAll('tr[data-row]')[3].click()")
    opened = browser.run("document.querySelector('tr.open').dataset.row")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(metrics_of(13, 50, random.Random(0))) + "\n")
    browser.run("window.before = true")
    write_report([folder], page, refresh_s=0.5)
    browser.wait("window.before === undefined && document.querySelector('tr.open') !== null")
    browser.wait("document.querySelector('.list').scrollTop > 0")
    assert browser.run("document.querySelector('[data-field=q]').value") == "make"
    assert browser.run("document.querySelector('tr.open').dataset.row") == opened
    assert browser.run("document.querySelector('.list').scrollTop") == 120
    assert browser.run("document.querySelector('[aria-sort]').innerText").startswith("reward")


def test_100k_rows_stay_usable(browser, tmp_path):
    chance = random.Random(0)
    rows = [row_of(step, p, s, 8, chance, None) for step in range(250) for p in range(50) for s in range(8)]
    (tmp_path / "r.html").write_text(render([Run(name="large", folder=tmp_path, rows=rows)], size_mb=100), "utf-8")
    browser.open(at(tmp_path / "r.html", view="samples"))
    assert browser.run("document.querySelector('.count').innerText") == "100,000 samples"
    sort = "(() => { const t = performance.now(); document.querySelector('[data-sort=reward]').click(); return performance.now() - t; })()"
    assert browser.run(sort) < 3_000  # ms, on a busy machine
    assert browser.run("document.querySelectorAll('tr[data-row]').length") == PAGE
    assert clean(browser), browser.errors
