"""Any module that the docs or the configs name may be the first that a program imports."""

import importlib
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "torchtitan_rl"


def public_modules() -> list[str]:
    """The modules of the package that the docs, the configs and the scripts import from."""
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "configs").glob("*.py"),
        *(ROOT / "scripts").glob("*.py"),
        *(ROOT / "examples").glob("*.py"),
    ]
    named = {
        name
        for page in pages
        for name in re.findall(rf"^(?:from|import) ({PACKAGE}[\w.]*)", page.read_text(), re.MULTILINE)
    }
    return sorted(named)


def failure_of(name: str) -> str:
    """What happens when a process, which has imported other packages only, imports this module. "" if nothing does."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        for loaded in [loaded for loaded in sys.modules if loaded.split(".")[0] == PACKAGE]:
            del sys.modules[loaded]
        try:
            importlib.import_module(name)
        except BaseException:
            os.write(writer, traceback.format_exc().encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return told


def test_each_public_module_can_be_imported_first():
    names = sorted({*public_modules(), f"{PACKAGE}.rewards"})
    assert f"{PACKAGE}.observe" in names
    for name in names:
        importlib.import_module(name)  # so that other packages are loaded once, here
    assert {name: told for name in names if (told := failure_of(name))} == {}


def test_a_script_started_with_a_python_without_torch_says_which_python_to_use():
    for script in ("make_random_checkpoint",):
        without_packages = [sys.executable, "-I", "-S", ROOT / "scripts" / f"{script}.py", "--help"]
        ended = subprocess.run(without_packages, capture_output=True, text=True, check=False)
        assert ended.returncode == 1
        assert "has no torch. Run scripts/setup.sh once and use .venv/bin/python." in ended.stderr
        assert "Traceback" not in ended.stderr
