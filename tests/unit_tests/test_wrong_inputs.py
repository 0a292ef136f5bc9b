"""Every wrong input gets its message: one field, one value, what was expected, the remedy. docs/errors.md is the same table."""

from pathlib import Path

import pytest

from tests.parts.faults import FAULTS
from tests.parts.wrong_inputs import SECTIONS, page
from torchtitan_rl.errors import UserError

ROWS = [row for rows in SECTIONS.values() for row in rows]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.given)
def test_wrong_input_has_its_documented_message(row, tmp_path):
    with pytest.raises(UserError) as raised:
        row.run(tmp_path)
    assert row.says in " ".join(str(raised.value).split())


def test_errors_page_equals_the_table():
    assert Path("docs/errors.md").read_text() == page()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_each_documented_fault_has_its_test(fault):
    file, _, function = fault.test.partition("::")
    assert f"def {function}(" in (Path("tests") / file).read_text()
