"""READING.md names what there is, and counts the lines of its way."""

import ast
import re
from pathlib import Path

CORE = Path(__file__).parents[2] / "torchtitan_rl"
PAGE = (CORE / "READING.md").read_text()
ROW = re.compile(r"^\| \[([\w/.]+)\]\(([\w/.]+)\) \|", re.MULTILINE)
TO_READ = re.compile(r"^\| \[([\w/.]+)\]\([\w/.]+\) \|[^|]*\| ([^|]+) \|$", re.MULTILINE)
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def places(file: str) -> dict[str, range]:
    """The lines of each class, function and method of a file, by its last name."""
    found: dict[str, range] = {}
    for node in ast.walk(ast.parse((CORE / file).read_text())):
        if isinstance(node, DEFINITIONS):
            begin = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found.setdefault(node.name, range(begin, node.end_lineno + 1))
    return found


def names(text: str) -> list[str]:
    return re.findall(r"`(\w+)`", text.partition("(")[0])


def test_every_file_that_is_listed_is_there():
    rows = ROW.findall(PAGE)
    assert all(name == link for name, link in rows)
    assert [name for name, _ in rows if not (CORE / name).is_file()] == []
    assert len({name for name, _ in rows}) == len(rows)


def test_the_way_of_one_step_has_fourteen_files_and_as_many_lines_as_the_page_says():
    way, total = TO_READ.findall(PAGE), 0
    assert len(way) == 14
    for file, text in way:
        found = places(file)
        read, _, skipped = text.partition("without")
        lines = {line for name in names(read) for line in found[name]}
        lines -= {line for name in names(skipped) for line in found[name]}
        if "the beginning" in read:
            lines |= set(range(1, min(place.start for place in found.values())))
        total += len(lines)
    said = int(re.search(r"about ([\d,]+) lines", PAGE)[1].replace(",", ""))
    assert abs(total - said) < 50, total


def test_every_function_on_the_way_of_a_value_is_in_its_file():
    rows = PAGE[PAGE.index("| value | files") : PAGE.index("## To look up")]
    stops = re.findall(r"([\w/]+\.py) \(([^)]*)\)", rows)
    assert len(stops) == 18
    for file, text in stops:
        source = (CORE / file).read_text()
        for name in re.findall(r"`([\w.]+)`", text):
            assert re.search(rf"\b{name.rpartition('.')[2]}\b", source), (file, name)
