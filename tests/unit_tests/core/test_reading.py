"""core/READING.md lists every file of the core with its size."""

import re
from pathlib import Path

CORE = Path(__file__).parents[3] / "torchtitan_rl" / "core"


def listed() -> dict[str, int]:
    """File: its number of lines as READING.md has it."""
    rows = re.findall(r"^\| \[([\w/.]+)\]\(([\w/.]+)\) \| (\d+) \|", (CORE / "READING.md").read_text(), re.MULTILINE)
    assert all(name == link for name, link, _ in rows)
    return {name: int(lines) for name, _, lines in rows}


def test_every_file_of_the_core_is_listed_once():
    files = {str(file.relative_to(CORE)) for file in CORE.rglob("*.py") if file.name != "__init__.py"}
    assert set(listed()) == files


def test_the_sizes_are_right():
    sizes = {name: (lines, (CORE / name).read_text().count("\n")) for name, lines in listed().items()}
    assert {name: size for name, size in sizes.items() if abs(size[0] - size[1]) > max(15, size[1] // 5)} == {}
