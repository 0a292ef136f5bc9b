"""README and docs: every script, module and file that is named is there, and knows the flags that it is given.

Command lines that start a run are parsed whole by test_readme.py.
"""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
SCRIPT = re.compile(r"(?:\./)?((?:scripts|tests|examples)/[\w/]+\.(?:py|sh|slurm))")
OF_A_RUN = ("torchtitan_rl.train", "torchtitan_rl.run.launch", "scripts/multinode_train.slurm")


def code_of_pages() -> Iterator[tuple[str, str]]:
    """(page, line) of all code, in blocks and in the text."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        blocks = [code for _, code in re.findall(r"```(\w*)\n(.*?)```", page.read_text(), re.DOTALL)]
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        for line in lines + [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]:
            yield from ((page.name, command) for command in re.split(r" && | > ", line))


def started(command: str) -> tuple[str, list[str]] | None:
    """The script or module of the repository that a command line starts, and what it is given."""
    try:
        words = shlex.split(command, comments=True)
    except ValueError:
        return None
    for i, word in enumerate(words):
        if match := SCRIPT.fullmatch(word):
            return match[1], words[i + 1 :]
        if words[i - 1] == "-m" and "python" in words[0] and word.startswith(("torchtitan_rl.", "scripts.", "tests.")):
            return word, words[i + 1 :]
    return None


def source_of(program: str) -> Path:
    """The file with a script's or a module's command line."""
    if "/" in program:
        return ROOT / program
    spec = importlib.util.find_spec(program)
    if spec and spec.submodule_search_locations:  # python -m PACKAGE runs its __main__
        spec = importlib.util.find_spec(f"{program}.__main__")
    return Path(spec.origin if spec and spec.origin else program)


def test_documented_commands_exist_and_accept_their_flags():
    wrong, seen = [], 0
    for page, command in code_of_pages():
        if not (found := started(command)):
            continue
        program, given = found
        seen += 1
        if not source_of(program).is_file():
            wrong.append(f"{page}: there is no {program}")
        elif program not in OF_A_RUN:  # a dotted flag is a config's field, which test_readme.py looks for
            known = source_of(program).read_text()
            flags = [word.partition("=")[0] for word in given if word.startswith("--") and "." not in word]
            wrong += [f"{page}: {program} has no {flag}" for flag in flags if not re.search(rf"{flag}\b", known)]
            names = re.findall(r"--test_name (\w+)", command)
            wrong += [f"{page}: {program} has no test {name}" for name in names if f'"{name}"' not in known]
    assert seen > 30
    assert not wrong


def test_packages_that_messages_tell_to_install_are_those_of_pyproject():
    """`torchtitan_rl[tasks]` was one: no index has this project."""
    sources = "".join(path.read_text() for path in (ROOT / "torchtitan_rl").rglob("*.py"))
    told = set(re.findall(r"pip install '([^']+)'", sources))
    assert told
    assert [package for package in told if f'"{package}"' not in (ROOT / "pyproject.toml").read_text()] == []
