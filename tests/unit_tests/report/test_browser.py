"""The report in a real browser: every view opens, the table shows the rows that Python says, hostile text does nothing."""

import json
import random
import re
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.parts.browser import CHROMIUM, MISSING, Browser
from tests.parts.report_runs import HOSTILE, metrics_of, row_of, write_run
from torchtitan_rl.report import Run, load_run, write_report
from torchtitan_rl.report.page import render
from torchtitan_rl.resilience.run_end import write_end

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
        for view in ("overview", "samples", "prompts", "compare", "health"):
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
    largest = max(abs(row["advantage"]) for row in rows)  # advantages have one scale in the whole run
    tokens = {"text": ["4", "<b>", "\n"], "logprob": [-0.01, -2.0, None], "diff": [0.0, 1e-5, None], "advantage": -1.5}
    (folder / "samples.jsonl").write_text("".join(json.dumps(row | {"tokens": tokens}) + "\n" for row in rows))
    write_report([folder], tmp_path / "r.html")
    browser.open(at(tmp_path / "r.html", view="samples", open=0))
    colours = "[...document.querySelectorAll('.token')].map(e => e.style.backgroundColor)"
    assert browser.run(colours) == []
    for paint, expected in (
        ("logprob", (0.0, 65.0)),
        ("diff", (0.0, 65.0)),
        ("advantage", (65.0 * 1.5 / largest, 65.0 * 1.5 / largest)),
    ):
        browser.run(f"document.querySelector('[data-paint={paint}]').click()")
        shares = [
            float(colour.split(" ")[-2].removesuffix("%,")) if colour else None for colour in browser.run(colours)
        ]
        assert shares == [pytest.approx(expected[0], abs=1), pytest.approx(expected[1], abs=1), None]
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


def test_a_failed_run_is_understood_from_the_first_screen(browser, tmp_path):
    folder = write_run(tmp_path / "a", steps=5, num_steps=50)
    error = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    g()\nZeroDivisionError: division by zero\n'
    write_end(folder, "failed", error, code=1, rank=1, phase="step 6: grade", started_s={"start the vLLM engine": 30.0})
    write_report([folder], tmp_path / "r.html")
    browser.open(tmp_path / "r.html", height=900)
    said = browser.run("document.querySelector('.ending').innerText")
    assert said.startswith("Failed in step 6, grade (rank 1): 5 of 50 steps")
    assert "ZeroDivisionError: division by zero" in said
    assert browser.run("document.querySelector('.ending').getBoundingClientRect().bottom") < 900
    where = browser.run("document.querySelector('[data-chart=\"Where time went\"]').innerText")
    assert "start the vLLM engine" in where
    shares = [float(share) for share in re.findall(r"([0-9.]+) %", where)]
    assert sum(shares) == pytest.approx(100, abs=0.3)
    assert clean(browser), browser.errors


def test_a_conversation_shows_its_turns_calls_errors_and_advantages(browser, tmp_path):
    folder = write_run(tmp_path / "a", steps=1)
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    said = [
        {"role": "assistant", "content": "call", "reward": -0.2, "advantage": 0.25, "logged": {"tool_calls": 1, "tool_errors": 1}},
        {"role": "tool", "name": "multiply", "content": "error: ValueError: no such number"},
        {"role": "assistant", "content": "the last word", "advantage": -0.5},
    ]  # fmt: skip
    messages = [{"role": "system", "content": "<tools>"}, {"role": "user", "content": "what was asked"}]
    rows[0] |= {"conversation": said, "messages": messages, "prompt": "<|im_start|>system", "environment_seconds": 1.5}
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report([folder], tmp_path / "r.html")
    browser.open(at(tmp_path / "r.html", view="samples", q="no such number"))
    assert shown(browser) == [0]  # only the tool said it
    line = browser.run("document.querySelector('tr[data-row]').innerText")
    assert "what was asked" in line
    assert "the last word" in line
    cards = browser.run("[...document.querySelectorAll('.cards > div')].map(e => e.innerText.replace('\\n', ' '))")
    assert cards == ["turns 2", "tool calls 1", "tool errors 1", "waiting 1.5 s"]
    turns = browser.run("[...document.querySelectorAll('.turn.assistant')].map(e => e.innerText)")
    assert "turn 1" in turns[0]
    assert "advantage 0.25" in turns[0]
    assert "advantage -0.5" in turns[1]
    assert browser.run("document.querySelectorAll('.turn.tool.error').length") == 1
    assert clean(browser), browser.errors


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


def test_prompts_are_listed_by_their_pass_rate(browser, tmp_path):
    folder = write_run(tmp_path / "a", steps=2, siblings=1)
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    right = {0: (False, False), 1: (True, True), 2: (False, True), 3: (True, False)}
    for row in rows:
        row |= {"prompt": f"prompt {row['prompt_idx']}", "correct": right[row["prompt_idx"]][row["step"] - 1]}
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report([folder], tmp_path / "r.html")
    browser.open(at(tmp_path / "r.html", view="prompts"))
    kinds = browser.run(
        "[...document.querySelectorAll('[data-table=prompts] tbody tr')].map(r => [r.children[0].innerText, r.children[1].innerText])"
    )
    assert sorted(kinds) == [["prompt 0", "stuck"], ["prompt 1", "solved"], ["prompt 2", "up"], ["prompt 3", "down"]]
    browser.run("document.querySelector('[data-table=prompts] button').click()")
    assert browser.run("document.querySelector('main').dataset.view") == "samples"
    assert clean(browser), browser.errors


def test_rows_tabs_and_charts_are_reached_by_keyboard(browser, one):
    browser.open(at(one[0], view="samples"))
    rows = browser.run("[...document.querySelectorAll('tr[data-row]')].map(e => e.tabIndex)")
    assert set(rows) == {0}
    browser.run("document.querySelectorAll('tr[data-row]')[2].focus()")
    browser.press("Enter")
    assert browser.run("document.activeElement.getAttribute('aria-current')") == "true"
    browser.run("document.querySelector('nav [aria-selected=true]').focus()")
    browser.press("ArrowRight")
    assert browser.run("document.querySelector('main').dataset.view") == "prompts"
    assert browser.run("document.activeElement.dataset.view") == "prompts"
    browser.open(one[0])
    label = browser.run("document.querySelector('[data-chart=Reward] .plot').getAttribute('aria-label')")
    assert label.startswith("Chart Reward. mean from 0.4")
    browser.wait("document.querySelector('[data-chart=Reward] canvas') !== null")
    browser.run("document.querySelector('[data-chart=Reward] .plot').focus()")
    browser.press("ArrowRight")
    browser.wait("document.querySelector('[data-chart=Reward] .where').innerText === 'step 0'")
    assert clean(browser), browser.errors


def test_the_tab_key_reaches_every_row_tab_chart_and_verdict(browser, two):
    reached = {}
    for view, wanted in (
        ("overview", "nav [aria-selected=true], .verdicts button, .plot"),
        ("samples", "tr[data-row], [data-sort], .detail [role=tab][aria-selected=true]"),
        ("compare", "tr[data-outcome], .chip, select, .plot"),
    ):
        browser.open(at(two[0], view=view))
        browser.run(f"window.wanted = new Set(document.querySelectorAll({wanted!r})); window.total = wanted.size")
        assert browser.run("total") > 5
        for _ in range(300):
            browser.press("Tab")
            browser.run("wanted.delete(document.activeElement)")
        reached[view] = browser.run("[...wanted].map(e => e.outerHTML.slice(0, 100))")
    assert reached == {"overview": [], "samples": [], "compare": []}


CONTRAST = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const parsed = (color) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const over = (top, below) => [0, 1, 2].map((i) => (top[i] * top[3] + below[i] * (255 - top[3])) / 255);
  const behind = (element) => { if (!element) return [255, 255, 255]; const own = parsed(getComputedStyle(element).backgroundColor); return own[3] === 255 ? own : over(own, behind(element.parentElement)); };
  const light = (rgb) => { const [r, g, b] = rgb.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4)); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const faded = (element) => (element ? Number(getComputedStyle(element).opacity) * faded(element.parentElement) : 1);
  const found = {};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !element.checkVisibility({ visibilityProperty: true }) || element.closest('script, noscript, button:disabled')) continue;
    const ground = behind(element);
    const color = parsed(getComputedStyle(element).color);
    const text = over([...color.slice(0, 3), color[3] * faded(element)], ground);
    const [a, b] = [light(text), light(ground)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const name = `${element.tagName.toLowerCase()}.${element.className} ${walker.currentNode.textContent.trim().slice(0, 20)}`;
    if (ratio < 4.5) found[name] = Number(ratio.toFixed(2));
  }
  const axis = over(parsed(getComputedStyle(document.documentElement).getPropertyValue('--soft')), [0, 0, 0]);
  const paper = over(parsed(getComputedStyle(document.documentElement).getPropertyValue('--paper')), [0, 0, 0]);
  const [a, b] = [light(axis), light(paper)].sort((x, y) => y - x);
  if ((a + 0.05) / (b + 0.05) < 4.5) found['axis of a chart'] = (a + 0.05) / (b + 0.05);
  return found;
})()"""
"""The texts of the page whose contrast with what is behind them is below 4.5, and their contrast."""


def run_with_all(folder: Path) -> Path:
    """A run whose report has every kind of text: warnings, errors, a conversation, coloured tokens."""
    folder = write_run(folder, steps=5, num_steps=50)
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    said = [
        {"role": "assistant", "content": "call", "reward": -0.2, "advantage": 0.25, "logged": {"tool_errors": 1}},
        {"role": "tool", "name": "multiply", "content": "error: ValueError: no such number"},
        {"role": "assistant", "content": "the last word", "advantage": -0.5},
    ]  # fmt: skip
    tokens = {"text": ["4", "word", "x"], "logprob": [-0.01, -5.0, None], "diff": [0.0, 1e-5, None], "advantage": -1.5}
    for place, row in enumerate(rows):
        row |= {"tokens": tokens, "messages": [{"role": "user", "content": "what was asked"}]}
        if place % 2:
            row |= {"conversation": said, "left_out": "too long"}
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "logs" / "rank_0.log").write_text(
        "2026-11-21 12:00:00,000 ERROR root: the sink died\n2026-11-21 12:00:00,000 WARNING root: slow\n"
    )
    write_end(folder, "failed", 'Traceback (most recent call last):\n  File "a", line 3, in f\nOSError: full', code=1)
    return folder


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("printed", [False, True])
def test_all_text_has_a_contrast_of_4_5(browser, tmp_path, two, dark, printed):
    write_report([run_with_all(tmp_path / "a")], tmp_path / "r.html")
    found = {}
    for page in (tmp_path / "r.html", two[0]):
        for state in (
            {}, {"view": "samples", "open": 0}, {"view": "samples", "open": 1}, {"view": "samples", "open": 0, "paint": "logprob"},
            {"view": "samples", "open": 0, "paint": "diff"}, {"view": "samples", "open": 0, "paint": "advantage"},
            {"view": "samples", "open": 1, "tab": "siblings"}, {"view": "samples", "open": 1, "tab": "history"},
            {"view": "prompts"}, {"view": "compare"}, {"view": "health"},
        ):  # fmt: skip
            browser.open(at(page, **state), dark=dark)
            if printed:
                browser.call("Emulation.setEmulatedMedia", media="print")
            browser.run("for (const one of document.querySelectorAll('details')) one.open = true")
            low = browser.run(CONTRAST)
            found |= {f"{state}: {name}": ratio for name, ratio in low.items()}
    browser.call("Emulation.setEmulatedMedia", media="")
    assert found == {}


def test_nothing_moves_under_the_pointer(browser, one, two):
    for page in (one[0], two[0]):
        for width in (1400, 390):
            browser.open(page, width=width)
            browser.run("for (const f of document.querySelectorAll('figure')) f.scrollIntoView()")
            browser.wait("[...document.querySelectorAll('.plot')].filter(p => p.plot).length >= 6")
            sizes = "JSON.stringify([...document.querySelectorAll('figure')].map(f => [f.offsetTop, f.offsetHeight]))"
            before = browser.run(sizes)
            moved = browser.run(
                f"""(() => {{ const seen = new Set([{sizes}]); for (const p of document.querySelectorAll('.plot')) if (p.plot)
                for (let i = 0; i < p.plot.data[0].length; i++) {{ p.plot.setCursor({{ left: p.plot.valToPos(p.plot.data[0][i], 'x'), top: 10 }}); seen.add({sizes}); }}
                return seen.size; }})()"""
            )
            assert moved == 1, (page, width, before)


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
    assert browser.run("document.querySelectorAll('tr[data-row]').length") == PAGE
    assert not browser.run("document.querySelector('[data-more]').disabled")


def test_conversations_are_compared_by_what_was_asked_and_said(browser, tmp_path):
    folders = []
    for name in ("a", "b"):
        folder = write_run(tmp_path / name, steps=1, prompts=1, siblings=2)
        rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        for row in rows:
            said = [
                {"role": "assistant", "content": "call"},
                {"role": "tool", "name": "multiply", "content": f"result {name}"},
            ]
            row |= {
                "prompt": "<|im_start|>system",
                "messages": [{"role": "user", "content": "what was asked"}],
                "conversation": said,
            }
        (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        folders.append(folder)
    write_report(folders, tmp_path / "r.html")
    browser.open(at(tmp_path / "r.html", view="compare"))
    assert "what was asked" in browser.run("document.querySelector('tr[data-outcome]').innerText")
    texts = browser.run("[...document.querySelectorAll('.pair .sibling .text')].map(e => e.innerText)")
    assert texts[0] == "assistant: call\ntool multiply: result a"
    assert browser.run("[...document.querySelectorAll('.pair mark')].map(e => e.innerText)") == ["b"]
    browser.open(at(tmp_path / "r.html", view="samples", open=0, tab="siblings"))
    assert "tool multiply: result a" in browser.run("document.querySelector('.siblings').innerText")
    assert clean(browser), browser.errors


def test_a_printed_page_has_the_words_and_not_the_controls(browser, one):
    browser.open(one[0])
    browser.call("Emulation.setEmulatedMedia", media="print")
    hidden = browser.run("['nav', '.theme'].map(s => getComputedStyle(document.querySelector(s)).display)")
    browser.call("Emulation.setEmulatedMedia", media="")
    assert hidden == ["none", "none"]


def test_paper_has_all_charts_in_the_light_theme(browser, one):
    browser.open(one[0], dark=True)
    browser.run("dispatchEvent(new Event('beforeprint'))")
    browser.call("Emulation.setEmulatedMedia", media="print")
    theme = browser.run("document.documentElement.dataset.theme")
    without = "[...document.querySelectorAll('figure')].filter(f => f.draw && !f.querySelector('canvas')).length"
    wide = "[...document.querySelectorAll('figure canvas')].filter(c => c.getBoundingClientRect().right > c.closest('figure').getBoundingClientRect().right).length"
    found = browser.run(f"[{without}, {wide}, document.querySelectorAll('figure canvas').length > 6]")
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.call("Emulation.setEmulatedMedia", media="", features=dark)
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert (theme, found) == ("light", [0, 0, True])
    assert browser.run("document.documentElement.dataset.theme") == "dark"
    assert clean(browser), browser.errors


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
    (tmp_path / "r.html").write_text(render([Run(name="large", folder=tmp_path, rows=rows)], size_mb=100)[0], "utf-8")
    browser.open(at(tmp_path / "r.html", view="samples"))
    assert browser.run("document.querySelector('.count').innerText") == "100,000 samples"
    sort = "(() => { const t = performance.now(); document.querySelector('[data-sort=reward]').click(); return performance.now() - t; })()"
    assert browser.run(sort) < 3_000  # ms, on a busy machine
    assert browser.run("document.querySelectorAll('tr[data-row]').length") == PAGE
    assert clean(browser), browser.errors
