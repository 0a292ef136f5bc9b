"""Every `Class.attribute` that the documentation names exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = [*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "torchtitan_rl/core/READING.md"]


def classes() -> dict[str, list[ast.ClassDef]]:
    """The package's classes by name. Each `Config` is one of those with this name."""
    found: dict[str, list[ast.ClassDef]] = {}
    for file in (ROOT / "torchtitan_rl").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


def attributes(node: ast.ClassDef, known: dict[str, list[ast.ClassDef]]) -> dict[str, str]:
    """The class's attributes, inherited ones included, each with its annotation as text."""
    found = {}
    for base in node.bases:
        for parent in known.get(ast.unparse(base).rpartition(".")[2], ()):
            if parent is not node and node.name != "Config":
                found |= attributes(parent, known)
    for one in ast.walk(node):
        if isinstance(one, ast.AnnAssign):
            found[ast.unparse(one.target).removeprefix("self.")] = ast.unparse(one.annotation)
        elif isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and one is not node:
            found.setdefault(one.name, "")
        elif isinstance(one, ast.Assign):
            found |= {ast.unparse(target).removeprefix("self."): "" for target in one.targets}
    return found


def exists(chain: list[str], known: dict[str, list[ast.ClassDef]]) -> bool:
    """Whether ["Episode", "credit", "mass"] exists. An attribute of what is none of the package's classes does."""
    name, attribute, *more = chain
    if name not in known:
        return True
    annotations = [found[attribute] for node in known[name] if attribute in (found := attributes(node, known))]
    return bool(annotations) and (not more or any(exists([of, *more], known) for of in annotations))


def test_every_attribute_of_a_class_in_the_documentation_exists():
    known, wrong, found = classes(), [], 0
    for page in PAGES:
        for code in re.findall(r"`([^`\n]+)`", page.read_text()):
            for chain in re.findall(r"(?<![\w.:/])[A-Z]\w*[a-z]\w*(?:\.[A-Za-z_]\w*)+", code):
                found += 1
                if not exists(chain.split("."), known):
                    wrong.append(f"{page.name}: {chain}")
    assert found > 15
    assert wrong == []


def test_an_attribute_that_does_not_exist_is_found():
    known = classes()
    assert exists(["Episode", "credit", "shaped_reward"], known)
    assert not exists(["Episode", "shaped_reward"], known)
    assert not exists(["Episode", "credit", "reward"], known)
