"""The house: imports lead inwards, no rooms and no files in a circle, no two names alike."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "torchtitan_rl"
RINGS = {
    "core": set(),
    "common": {"core"},
    "proof": {"core"},
    "library": {"core", "common", "proof"},
    "observability": {"core", "common"},
    "resilience": {"core", "common"},
    "setup": {"core", "common", "library", "observability", "proof", "resilience"},
    "report": set(),
}
"""Ring: the rings that it may import besides itself. `train.py` alone may import all of them."""
ALGORITHM_MAY_IMPORT = {"algorithm", "config", "own_config", "errors", "summary", "types"}
"""Rooms of the core. Besides these: torch, numpy, torchtitan's Configurable and the standard library."""


def imports_of(file: Path, *, types: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name below the package) of every import of this package, lazy ones too. `types`: also for type checkers."""
    tree = ast.parse(file.read_text())
    for_types = {
        id(n)
        for i in ast.walk(tree)
        if isinstance(i, ast.If) and "TYPE_CHECKING" in ast.unparse(i.test)
        for n in ast.walk(i)
    }
    for node in ast.walk(tree):
        if id(node) in for_types and not types:
            continue
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import"
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name.split(".", 1)[1]) for name in found if name.startswith("torchtitan_rl."))


def files(package: Path = PACKAGE) -> Iterator[tuple[Path, str]]:
    """(file, its ring) of every module in a ring."""
    for file in sorted(package.rglob("*.py")):
        ring, *rest = file.relative_to(package).parts
        if rest:
            yield file, ring


def outward_imports(package: Path = PACKAGE) -> list[str]:
    return [
        f"{file.relative_to(package)}:{line} imports {name}"
        for file, ring in files(package)
        for line, name in imports_of(file, types=True)
        if name.split(".")[0] in RINGS and name.split(".")[0] not in {ring, *RINGS[ring]}
    ]


def room_of(module: str) -> str:
    """The folder that a module is in; a module right in a ring is a room of its own. Example: "core.generator", "core.types"."""
    parts = module.split(".")
    path = PACKAGE
    for depth, part in enumerate(parts):
        path /= part
        if not path.is_dir():
            return ".".join(parts[: max(depth, 2)])
    return ".".join(parts)


def rooms(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Each room's imports of other rooms."""
    found: dict[str, set[str]] = {}
    for file, _ in files(package):
        room = room_of(".".join(file.relative_to(package).with_suffix("").parts))
        room = room.removesuffix(".__init__")
        found.setdefault(room, set()).update(room_of(name) for _, name in imports_of(file, types=False))
        found[room].discard(room)
    return found


def file_of(module: str, package: Path) -> str:
    """The file that defines a dotted name, without its suffix. Example: "core/types" for "core.types.Prompt"."""
    path = package.joinpath(*module.split("."))
    while path != package:
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return str(file.relative_to(package).with_suffix(""))
        path = path.parent
    return ""


def file_imports(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Each file's imports of other files, also for types alone."""
    found: dict[str, set[str]] = {}
    for file, _ in files(package):
        name = str(file.relative_to(package).with_suffix(""))
        found[name] = {file_of(module, package) for _, module in imports_of(file, types=True)} - {name, ""}
    return found


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of rooms or files each of which imports, directly or not, every other one."""
    reached = {room: set() for room in graph}
    for room in graph:
        todo = [room]
        while todo:
            for other in graph.get(todo.pop(), ()):
                if other not in reached[room]:
                    reached[room].add(other)
                    todo.append(other)
    in_circle = {room for room in graph if room in reached[room]}
    return sorted(
        {tuple(sorted(o for o in in_circle if o in reached[room] and room in reached[o])) for room in in_circle}
    )


def shared_names(package: Path = PACKAGE) -> list[str]:
    """Names that two modules have, or two public classes."""
    modules = [file.stem for file, _ in files(package) if file.stem != "__init__"]
    classes = [
        node.name
        for file, _ in files(package)
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    return [name for names in (modules, classes) for name, times in Counter(names).items() if times > 1]


def test_no_two_modules_or_classes_share_a_name():
    assert shared_names() == []


def test_imports_lead_inwards():
    assert outward_imports() == []


def test_packages_have_no_import_cycle():
    assert circles(rooms()) == []


def test_files_have_no_import_cycle_not_even_for_types():
    assert circles(file_imports()) == []


def test_generator_and_trainer_do_not_import_each_other():
    graph = rooms()
    assert "core.trainer" not in graph["core.generator"]
    assert "core.generator" not in graph["core.trainer"]


def test_algorithm_imports_only_torch_numpy_and_types():
    graph = rooms()
    assert {room.removeprefix("core.") for room in graph["core.algorithm"]} <= ALGORITHM_MAY_IMPORT


@pytest.mark.parametrize(
    "code", ["import torchtitan_rl.models", "def f():\n    from torchtitan_rl.build import hub"]
)
def test_outward_import_is_found(tmp_path, code):
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "room.py").write_text(code)
    assert len(outward_imports(tmp_path)) == 1


def test_only_the_entry_point_imports_all_rings():
    others = [f.name for f in PACKAGE.glob("*.py") if f.name not in ("__init__.py", "train.py")]
    assert others == []
