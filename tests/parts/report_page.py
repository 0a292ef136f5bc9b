"""What the browser tests ask of a report page."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.parts.browser import Browser
from tests.parts.report_runs import change_rows, write_run
from torchtitan_rl.observe.report import write_report

ROWS_OF_A_PAGE = 50
"""Rows that the table of samples shows at once."""


def at(page: Path, **state) -> str:
    """The address of the page with this state."""
    return page.resolve().as_uri() + "#" + quote(json.dumps(state))


def open_samples(
    browser: Browser, folder: Path, changed: dict | Callable[[dict], Any], *, run: dict, height: int = 1000, **state
) -> None:
    """Opens the samples of a run of its own, `write_run(**run)`, whose rows `changed` alters: the cells, or a function of a row."""
    change_rows(write_run(folder / "a", **run), changed if callable(changed) else lambda row: row.update(changed))
    write_report(folder / "a", folder / "r.html")
    browser.open(at(folder / "r.html", view="samples", **state), height=height)


def shown(browser: Browser) -> list[int]:
    """The row numbers of the table, over all its pages."""
    found = []
    while True:
        found += browser.run("[...document.querySelectorAll('tr[data-row]')].map(tr => Number(tr.dataset.row))")
        if browser.run("document.querySelector('[aria-label=\"next page\"]')?.disabled ?? true"):
            return found
        browser.run("document.querySelector('[aria-label=\"next page\"]').click()")


def text(browser: Browser, selector: str) -> str:
    """The text of the first element."""
    return browser.run(f"document.querySelector({json.dumps(selector)}).innerText")


def texts(browser: Browser, selector: str) -> list[str]:
    """The texts of all elements."""
    return browser.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText)")


def clean(browser: Browser) -> bool:
    """Whether the console stayed silent and nothing was asked of a network."""
    return browser.errors == [] and all(url.startswith(("file:", "data:")) for url in browser.requests)
