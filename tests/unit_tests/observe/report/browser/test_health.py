"""The health page in a browser."""

from tests.parts.report_page import at, text
from tests.parts.report_runs import write_run
from torchtitan_rl.observe.report import load_run, write_report


def test_the_health_page_lists_warnings(browser, tmp_path):
    folder = write_run(tmp_path / "a", steps=3)
    (folder / "logs" / "rank_0.log").write_text("2026-11-21 12:00:00,000 ERROR root: the sink died\n")
    write_report(folder, tmp_path / "r.html")
    browser.open(at(tmp_path / "r.html", view="health"))
    assert "the sink died" in text(browser, "[data-table=warnings]")
    assert text(browser, ".alarm") == "1"
    assert load_run(folder).warnings[0]["level"] == "ERROR"
