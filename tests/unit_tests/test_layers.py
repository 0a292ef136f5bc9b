"""The house: a drawer for each verb of the step, in one order, no drawers and no files in a circle, no two names alike."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "torchtitan_rl"
ORDER = [
    {"comm", "conversation", "device", "errors", "events", "fields", "link", "replicated"}
    | {"sampling", "stored", "summary", "text", "types"},
    {"algorithm", "models"},
    {"data"},
    {"rewards", "trainer"},
    {"environments"},
    {"generator"},
    {"sync"},
    {"state"},
    {"observe"},
    {"controller", "evaluation", "generator_rank", "parts", "sampler"},
    {"run"},
    {"config"},
    {"validation"},
    {"build"},
    {"configs"},
    {"command"},
    {"api"},
]
"""Drawers and files of the package, the lowest first. Each imports from its own drawer and from those of lower floors; files of the first
floor, and of the controller's, also from each other."""
SHARED_FLOORS = (0, 9)
NAMED_FROM_BELOW = {("run", "config"), ("controller", "run")}
"""(drawer, drawer above it that it names for type checkers): what keeps a run reads the fields of its config, and the loop saves it."""


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
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name.split(".", 1)[1]) for name in names if name.startswith("torchtitan_rl."))


def files(package: Path = PACKAGE) -> Iterator[tuple[Path, str]]:
    """(file, its drawer) of every module."""
    for file in sorted(package.rglob("*.py")):
        drawer = file.relative_to(package).with_suffix("").parts[0]
        if drawer != "__init__":
            yield file, drawer


def floor_of(drawer: str) -> int:
    return next(number for number, drawers in enumerate(ORDER) if drawer in drawers)


def may_import(drawer: str, other: str) -> bool:
    floor, below = floor_of(drawer), floor_of(other)
    return drawer == other or below < floor or (below == floor and floor in SHARED_FLOORS)


def upward_imports(package: Path = PACKAGE) -> list[str]:
    upward = []
    for file, drawer in files(package):
        at_run_time = {line for line, _ in imports_of(file, types=False)}
        for line, name in imports_of(file, types=True):
            other = name.split(".")[0]
            if not any(other in drawers for drawers in ORDER) or may_import(drawer, other):
                continue
            if line in at_run_time or (drawer, other) not in NAMED_FROM_BELOW:
                upward.append(f"{file.relative_to(package)}:{line} imports {name}")
    return upward


def file_of(module: str, package: Path) -> str:
    """The file that defines a dotted name, without its suffix. Example: "data/task" for "data.task.Task"."""
    path = package.joinpath(*module.split("."))
    while path != package:
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return str(file.relative_to(package).with_suffix(""))
        path = path.parent
    return ""


def file_imports(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Each file's imports of other files, also for types alone."""
    graph: dict[str, set[str]] = {}
    for file, _ in files(package):
        name = str(file.relative_to(package).with_suffix(""))
        graph[name] = {file_of(module, package) for _, module in imports_of(file, types=True)} - {name, ""}
    return graph


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


def test_every_drawer_has_its_floor():
    assert {drawer for _, drawer in files()} == set().union(*ORDER)


def test_imports_lead_down():
    assert upward_imports() == []


def test_files_have_no_import_cycle_not_even_for_types():
    TopologicalSorter(file_imports()).prepare()  # else it raises CycleError, with the files


def test_no_two_modules_or_classes_share_a_name():
    assert shared_names() == []


def test_upward_import_is_found(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "room.py").write_text("def f():\n    from torchtitan_rl.run import memory")
    assert upward_imports(tmp_path) == ["data/room.py:2 imports run.memory"]


LOOP_ALONE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[:2] in (["torchtitan_rl", drawer] for drawer in {absent}):
            raise ImportError(f"{{name}} is absent")

sys.meta_path.insert(0, Absent())
from torchtitan_rl.controller import Controller
from torchtitan_rl.sync.weight_sync import WeightSync
from torchtitan_rl.trainer.trainer import Trainer
assert "vllm" not in sys.modules
"""


def test_loop_needs_no_observe_no_run_and_no_environments():
    absent = ["observe", "run", "environments", "config", "build", "command"]
    ended = subprocess.run([sys.executable, "-c", LOOP_ALONE.format(absent=absent)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
