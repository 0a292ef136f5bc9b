"""One browser for all tests of the report's page, and the pages that many of them open."""

import pytest

from tests.parts.browser import CHROMIUM, MISSING, Browser
from tests.parts.report_runs import write_run
from torchtitan_rl.observe.report import write_report


@pytest.fixture(scope="session")
def started_browser(tmp_path_factory):
    """One browser for all tests here."""
    if CHROMIUM is None:
        pytest.skip(MISSING)
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def browser(started_browser):
    """The browser, which leaves the test's page at its end."""
    yield started_browser
    started_browser.rest()


@pytest.fixture(scope="session")
def one(tmp_path_factory):
    """A report of one run, and the run."""
    folder = tmp_path_factory.mktemp("one")
    run = write_report(write_run(folder / "a", steps=12), folder / "r.html")
    return folder / "r.html", run
