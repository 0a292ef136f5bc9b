"""The page by keyboard and in contrast, and nothing moves under the pointer."""

import gzip
import json
from pathlib import Path

import pytest

from tests import parts
from tests.parts.report_page import at
from tests.parts.report_runs import change_rows, write_evaluations, write_run
from torchtitan_rl.observe.report import write_report
from torchtitan_rl.run.run_end import write_end


def test_the_tab_key_reaches_every_row_tab_chart_and_line(browser, one):
    reached = {}
    for view, wanted in (
        ("overview", "nav [aria-selected=true], .lines button, .plot"),
        ("samples", "tr[data-row], [data-sort], .detail [role=tab][aria-selected=true]"),
    ):
        browser.open(at(one[0], view=view))
        browser.run("for (const one of document.querySelectorAll('.still')) one.open = true")
        browser.run(f"window.wanted = new Set(document.querySelectorAll({wanted!r})); window.total = wanted.size")
        assert browser.run("total") > 5
        for _ in range(300):
            browser.press("Tab")
            browser.run("wanted.delete(document.activeElement)")
        reached[view] = browser.run("[...wanted].map(e => e.outerHTML.slice(0, 100))")
    assert reached == {"overview": [], "samples": []}


def run_with_all(folder: Path) -> Path:
    """A run whose report has every kind of text: warnings, errors, a conversation, coloured tokens."""
    folder = write_run(folder, steps=5, num_steps=50)
    said = [
        {"role": "assistant", "content": "call", "reward": -0.2, "advantage": 0.25, "logged": {"tool_errors": 1}},
        {"role": "tool", "name": "multiply", "content": "error: ValueError: no such number"},
        {"role": "assistant", "content": "the last word", "advantage": -0.5, "trace": 1},
    ]  # fmt: skip
    context = {"context": [{"role": "user", "content": "shorter"}], "context_tokens": 3, "tokens": 9}
    traces = [{"parent": None, "reason": ""} | context, {"parent": 0, "reason": "compacted"} | context]
    tokens = {"text": ["4", "word", "x"], "logprob": [-0.01, -5.0, None], "diff": [0.0, 1e-5, None], "advantage": -1.5}
    talk = {"conversation": said, "traces": traces, "left_out": "too long"}
    asked = [{"role": "user", "content": "what was asked"}]
    change_rows(folder, lambda r: r.update(tokens=tokens, messages=asked, **(talk if r["sample_idx"] % 2 else {})))
    (folder / "logs" / "rank_0.log").write_text(
        "2026-11-21 12:00:00,000 ERROR root: the sink died\n2026-11-21 12:00:00,000 WARNING root: slow\n"
    )
    write_end(folder, "failed", 'Traceback (most recent call last):\n  File "a", line 3, in f\nOSError: full', code=1)
    write_evaluations(folder)
    resumed = {"resumed": {"step": 2, "changed": {"trainer.optimizer.lr": "0.1 -> 0.2"}}}
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | resumed))
    return folder


STATES = (
    {}, {"view": "samples", "open": "train/1/0/0", "paint": "logprob"}, {"view": "samples", "open": "train/1/0/1", "tokensOpen": True},
    {"view": "samples", "open": "train/1/0/1", "tab": "siblings"}, {"view": "samples", "open": "train/1/0/1", "tab": "history"},
    {"view": "samples", "open": "train/9/9/9"}, {"view": "prompts"}, {"view": "health"},
)  # fmt: skip
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


@pytest.mark.parametrize(("dark", "width"), [(False, 1400), (True, 390)])
def test_axe_finds_no_violation(browser, tmp_path, width, dark):
    axe = gzip.decompress((Path(parts.__file__).parent / "axe" / "axe-core-4.10.3.min.js.gz").read_bytes()).decode()
    write_report(run_with_all(tmp_path / "a"), tmp_path / "r.html")
    two = [tmp_path / "a", write_evaluations(write_run(tmp_path / "b", seed=1))]
    write_report(two[0], tmp_path / "two.html", others=two[1:])
    found = {}
    pages = [("r.html", state) for state in STATES] + [
        ("two.html", {"view": v}) for v in ("overview", "samples", "prompts", "health")
    ]
    for page, state in pages:
        browser.open(at(tmp_path / page, **state), width=width, dark=dark)
        browser.run("for (const one of document.querySelectorAll('details')) one.open = true")
        browser.run(f"{axe}; 1")
        rules = json.dumps({"runOnly": RULES})
        bad = browser.run(f"axe.run(document, {rules}).then(r => r.violations.map(v => [v.id, v.nodes[0].html]))")
        found |= {f"{page} {state}": bad} if bad else {}
    assert found == {}
