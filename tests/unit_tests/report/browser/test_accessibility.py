"""The page by keyboard and in contrast, and nothing moves under the pointer."""

import gzip
import json
from pathlib import Path

import pytest

from tests import parts
from tests.parts.report_page import at, clean
from tests.parts.report_runs import write_run
from torchtitan_rl.report import write_report
from torchtitan_rl.resilience.run_end import write_end


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
        {"role": "assistant", "content": "the last word", "advantage": -0.5, "trace": 1},
    ]  # fmt: skip
    context = {"context": [{"role": "user", "content": "shorter"}], "context_tokens": 3, "tokens": 9}
    traces = [{"parent": None, "reason": ""} | context, {"parent": 0, "reason": "compacted"} | context]
    tokens = {"text": ["4", "word", "x"], "logprob": [-0.01, -5.0, None], "diff": [0.0, 1e-5, None], "advantage": -1.5}
    for place, row in enumerate(rows):
        row |= {"tokens": tokens, "messages": [{"role": "user", "content": "what was asked"}]}
        if place % 2:
            row |= {"conversation": said, "traces": traces, "left_out": "too long"}
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "logs" / "rank_0.log").write_text(
        "2026-11-21 12:00:00,000 ERROR root: the sink died\n2026-11-21 12:00:00,000 WARNING root: slow\n"
    )
    write_end(folder, "failed", 'Traceback (most recent call last):\n  File "a", line 3, in f\nOSError: full', code=1)
    return folder


TEXTS = (
    {}, {"view": "samples", "open": "train/1/0/0"}, {"view": "samples", "open": "train/1/0/1"}, {"view": "samples", "open": "train/1/0/0", "paint": "logprob"},
    {"view": "samples", "open": "train/1/0/0", "paint": "diff"}, {"view": "samples", "open": "train/1/0/0", "paint": "advantage"},
    {"view": "samples", "open": "train/1/0/1", "tab": "siblings"}, {"view": "samples", "open": "train/1/0/1", "tab": "history"},
    {"view": "prompts"}, {"view": "compare"}, {"view": "health"},
)  # fmt: skip
OF_TWO_RUNS = ({}, {"view": "compare"})
"""What a page of two runs shows in another way than a page of one."""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("printed", [False, True])
def test_all_text_has_a_contrast_of_4_5(browser, tmp_path, two, dark, printed):
    write_report([run_with_all(tmp_path / "a")], tmp_path / "r.html")
    found = {}
    for page, states in ((tmp_path / "r.html", TEXTS), (two[0], OF_TWO_RUNS)):
        for state in states:
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
            browser.run(
                "(async () => { for (const f of document.querySelectorAll('figure')) { f.scrollIntoView(); await new Promise(r => setTimeout(r, 50)); } })()"
            )
            browser.wait("[...document.querySelectorAll('.plot')].filter(p => p.plot).length >= 6")
            sizes = "JSON.stringify([...document.querySelectorAll('figure')].map(f => [f.offsetTop, f.offsetHeight]))"
            before = browser.run(sizes)
            moved = browser.run(
                f"""(() => {{ const seen = new Set([{sizes}]); for (const p of document.querySelectorAll('.plot')) if (p.plot)
                for (let i = 0; i < p.plot.data[0].length; i++) {{ p.plot.setCursor({{ left: p.plot.valToPos(p.plot.data[0][i], 'x'), top: 10 }}); seen.add({sizes}); }}
                return seen.size; }})()"""
            )
            assert moved == 1, (page, width, before)


STATES = (
    {}, {"view": "samples", "open": "train/1/0/0", "paint": "logprob"}, {"view": "samples", "open": "train/1/0/1", "tokensOpen": True},
    {"view": "samples", "open": "train/1/0/1", "tab": "siblings"}, {"view": "samples", "open": "train/1/0/1", "tab": "history"},
    {"view": "samples", "open": "train/9/9/9"}, {"view": "prompts"}, {"view": "compare"}, {"view": "health"},
)  # fmt: skip
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


@pytest.mark.parametrize(
    ("dark", "width"),
    [
        (False, 1400),
        (True, 390),
        pytest.param(False, 390, marks=pytest.mark.long),
        pytest.param(True, 1400, marks=pytest.mark.long),
    ],
)
def test_axe_finds_no_violation(browser, tmp_path, two, width, dark):
    axe = gzip.decompress((Path(parts.__file__).parent / "axe" / "axe-core-4.10.3.min.js.gz").read_bytes()).decode()
    write_report([run_with_all(tmp_path / "a")], tmp_path / "r.html")
    found = {}
    for page, states in ((tmp_path / "r.html", STATES), (two[0], OF_TWO_RUNS)):
        for state in states:
            browser.open(at(page, **state), width=width, dark=dark)
            browser.run("for (const one of document.querySelectorAll('details')) one.open = true")
            browser.run(f"{axe}; 1")
            rules = json.dumps({"runOnly": RULES})
            bad = browser.run(f"axe.run(document, {rules}).then(r => r.violations.map(v => [v.id, v.nodes[0].html]))")
            found |= {f"{page.name} {state}": bad} if bad else {}
    assert found == {}


def test_a_sample_is_opened_by_its_name_in_four_keys_and_the_name(browser, one):
    browser.open(one[0])
    browser.press("2")
    browser.press("/")
    browser.call("Input.insertText", text="train/7/2/3")
    browser.press("Enter")
    browser.wait(
        "document.querySelector('.detail .facts')?.innerText.startsWith('step 7 · train · prompt 2 · sample 3')"
    )
    assert browser.run("document.activeElement.matches('tr.open')")
    assert clean(browser), browser.errors


def test_the_first_key_leads_past_the_tabs_and_a_chart_s_reading_is_spoken(browser, two):
    browser.open(two[0])
    browser.press("Tab")
    assert browser.run("document.activeElement.innerText") == "skip to the content"
    browser.run("document.activeElement.click()")
    assert browser.run("document.activeElement.tagName") == "MAIN"
    browser.wait("document.querySelector('[data-chart=Reward] canvas') !== null")
    browser.run("document.querySelector('[data-chart=Reward] .plot').focus()")
    browser.press("ArrowLeft")
    said = browser.run("document.querySelector('[data-chart=Reward] [role=status]').innerText")
    assert said.startswith("step 12, a ")
    assert ", b " in said


def test_runs_differ_in_their_dash_and_not_only_in_colour(browser, two):
    browser.open(two[0])
    browser.wait("document.querySelector('[data-chart=Reward] canvas') !== null")
    dashes = browser.run(
        "document.querySelector('[data-chart=Reward] .plot').plot.series.slice(1).filter(s => s.width > 1).map(s => s.dash.join())"
    )
    assert len(set(dashes)) == 2
    styles = browser.run(
        "[...document.querySelectorAll('[data-chart=Reward] .key')].map(e => getComputedStyle(e, '::before').borderTopStyle)"
    )
    assert styles == ["solid", "dashed"]
