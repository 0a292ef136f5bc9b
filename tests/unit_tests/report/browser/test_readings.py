"""What a chart's legend says: measured values, each at its own step."""

import json

import pytest

from tests.parts.report_page import at, clean
from tests.parts.report_runs import write_run
from torchtitan_rl.report import write_report


def legend(browser, title, step=None):
    """The legend's values of a chart, at rest or with the pointer at a step."""
    chart = f"document.querySelector('[data-chart=\"{title}\"]')"
    browser.run(f"{chart}.scrollIntoView()")
    browser.wait(f"{chart}.querySelector('canvas') !== null")
    if step is not None:
        browser.run(
            f"(p => p.setCursor({{ left: p.valToPos({step}, 'x'), top: 10 }}))({chart}.querySelector('.plot').plot)"
        )
        browser.wait(f"{chart}.querySelector('.where').innerText === 'step {step}'")
    return browser.run(f"[...{chart}.querySelectorAll('.key b')].map(e => e.innerText)")


def test_a_measurement_has_the_step_at_which_it_was_made(browser, one):
    browser.open(one[0])  # evaluated at steps 0, 4, 8 and 12
    assert legend(browser, "Held-out accuracy", 3) == ["25.0 %, step 0"]
    assert legend(browser, "Held-out accuracy", 4) == ["41.7 %"]


@pytest.mark.parametrize("series", ["", "evaluation/accuracy"])
def test_smoothing_leaves_measured_accuracy_as_it_is(browser, tmp_path, series):
    folder = write_run(tmp_path / "a", steps=8)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if "evaluation/accuracy" in line:
            line |= {"evaluation/accuracy_low": 0.2, "evaluation/accuracy_high": 1.0}
    lines[-1]["evaluation/accuracy"] = 1.0
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = write_report(folder, tmp_path / "r.html")
    browser.open(at(tmp_path / "r.html", smooth=0.9, series=series))
    title = series or "Held-out accuracy"
    assert legend(browser, title) == ["1" if series else "100.0 %"]
    drawn = browser.run(f"document.querySelector('[data-chart=\"{title}\"] .plot').plot.data.slice(1)")
    assert [[v for v in values if v is not None] for values in drawn][-1] == [0.25, 0.5, 1.0]
    assert "smoothed" not in browser.run(f"document.querySelector('[data-chart=\"{title}\"]').innerText")
    assert legend(browser, "Reward") == [f"{run.series['reward/mean'][-1]:.3g}"]  # as measured
    assert "curves smoothed" in browser.run("document.querySelector('[data-chart=Reward]').innerText")
    assert clean(browser), browser.errors
