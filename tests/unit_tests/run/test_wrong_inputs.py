"""Every wrong input gets its message: one field, one value, what was expected, the remedy. docs/errors.md is the same table."""

from pathlib import Path

import pytest

from tests.unit_tests.run.wrong_inputs import SECTIONS, page
from torchtitan_rl.run.errors import UserError

ROWS = [row for rows in SECTIONS.values() for row in rows]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.given)
def test_says(row, tmp_path):
    with pytest.raises(UserError) as raised:
        row.run(tmp_path)
    assert row.says in " ".join(str(raised.value).split())


def test_the_page_is_this_table():
    assert Path("docs/errors.md").read_text() == page()


def test_the_page_has_what_was_asked_for():
    assert len(ROWS) >= 60
