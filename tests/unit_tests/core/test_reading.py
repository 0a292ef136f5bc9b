"""core/READING.md lists every file of the core."""

import re
from pathlib import Path

CORE = Path(__file__).parents[3] / "torchtitan_rl" / "core"


def test_every_file_of_the_core_is_listed_once():
    rows = re.findall(r"^\| \[([\w/.]+)\]\(([\w/.]+)\) \|", (CORE / "READING.md").read_text(), re.MULTILINE)
    assert all(name == link for name, link in rows)
    files = [str(file.relative_to(CORE)) for file in CORE.rglob("*.py") if file.name != "__init__.py"]
    assert sorted(name for name, _ in rows) == sorted(files)
