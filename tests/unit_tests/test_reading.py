"""READING.md is one page, and names what there is."""

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "torchtitan_rl"
PAGE = (PACKAGE / "READING.md").read_text()


def test_the_way_of_one_step_has_nine_files_on_one_page():
    assert len(re.findall(r"^\| \[", PAGE, re.MULTILINE)) == 9
    assert len(PAGE.splitlines()) <= 60


def test_every_file_and_drawer_that_is_named_is_there():
    links = re.findall(r"\[([\w/.]+)\]\(([\w/.]+)\)", PAGE)
    assert all(name == link for name, link in links)
    drawers = re.findall(r"^\| ([\w/., ]+) \|", PAGE.partition("## The way")[0], re.MULTILINE)
    named = [link for _, link in links] + [name for row in drawers[1:] for name in row.split(", ")]
    assert [name for name in named if not (PACKAGE / name).exists()] == []
    assert {"algorithm/", "build.py", "sync/probe.py"} <= {*named}
