"""README and docs: every command, flag, field, config and file that is named exists."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan_rl import types
from torchtitan_rl.command.command import READERS
from torchtitan_rl.command.registry import config_functions, load_config, parse_args

ROOT = Path(__file__).parents[3]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "verifiers" / "README.md"]
PAGES = {str(page.relative_to(ROOT)): page.read_text() for page in FILES}
PAGE = "".join(PAGES.values())
SHOWN = ("--help", "--list-configs", "--print-config", "--dry-run", "--preview")
LAUNCHERS = ("run_train.sh", "torchtitan_rl.command.train", "scripts/multinode_train.slurm")
SCRIPT = re.compile(r"(?:\./)?((?:scripts|tests|examples)/[\w/]+\.(?:py|sh|slurm))")


def commands_of_pages() -> Iterator[tuple[str, list[str]]]:
    """(page, words) of each line of code, in blocks and in the text."""
    for name, page in PAGES.items():
        blocks = re.findall(r"```\w*\n(.*?)```", page, re.DOTALL)
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        text = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
        for line in lines + [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]:
            for command in re.split(r" && | > ", line):
                try:
                    yield name, shlex.split(command, comments=True)
                except ValueError:  # no command
                    continue


def runs() -> list[tuple[str, str]]:
    """(page, arguments) of every command that starts a run."""
    found = []
    for name, words in commands_of_pages():
        for i, word in enumerate(words):
            if word.removeprefix("./") in LAUNCHERS and "..." not in words:
                found.append((name, shlex.join(words[i + 1 :])))
    return found


@pytest.fixture
def here(files):
    """A folder with examples/, tests/, scripts/ and the Python blocks of all pages."""
    for name in ("examples", "tests", "scripts"):
        (files / name).symlink_to(ROOT / name)


@pytest.mark.parametrize(("page", "arguments"), runs())
def test_documented_command_lines_parse(here, page, arguments):
    args = [arg for arg in shlex.split(arguments) if arg not in SHOWN and not re.fullmatch(r"\d+x\d+", arg)]
    assert parse_args(args)[1].num_steps >= 1


def started(words: list[str]) -> tuple[str, list[str]] | None:
    """The script or module of the repository that a command starts, and its arguments."""
    for i, word in enumerate(words):
        if word.endswith("torchtitan-rl") and words[i + 1 : i + 2] and words[i + 1] in READERS:
            place = "observe.report" if words[i + 1] == "report" else "command.programs"
            return f"torchtitan_rl.{place}", words[i + 2 :]
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


def test_documented_scripts_exist_and_accept_their_flags():
    wrong, seen = [], 0
    for page, words in commands_of_pages():
        if not (found := started(words)):
            continue
        program, given = found
        seen += 1
        if not source_of(program).is_file():
            wrong.append(f"{page}: there is no {program}")
        elif program not in (*LAUNCHERS, "torchtitan_rl.run.launch"):  # a dotted flag is a config's field
            known = source_of(program).read_text()
            flags = [word.partition("=")[0] for word in given if word.startswith("--") and "." not in word]
            wrong += [f"{page}: {program} has no {flag}" for flag in flags if not re.search(rf"{flag}\b", known)]
            names = re.findall(r"--test_name (\w+)", shlex.join(words))
            wrong += [f"{page}: {program} has no test {name}" for name in names if f'"{name}"' not in known]
    assert seen > 30
    assert not wrong


def test_packages_that_messages_tell_to_install_are_those_of_pyproject():
    """`torchtitan_rl[tasks]` was one: no index has this project."""
    sources = "".join(path.read_text() for path in (ROOT / "torchtitan_rl").rglob("*.py"))
    told = set(re.findall(r"pip install '([^']+)'", sources))
    assert told
    assert [package for package in told if f'"{package}"' not in (ROOT / "pyproject.toml").read_text()] == []


def test_every_field_that_is_named_exists():
    configs = [load_config(name) for name in config_functions()]
    tops = "|".join(configs[0].to_dict())
    unknown = []
    for name, page in PAGES.items():
        page = page.replace("algorithm.loss.fraction", "")  # of the example's own loss
        page = re.sub(r"^\| `--[^|]*", "", page, flags=re.MULTILINE)  # rows of wrong inputs
        overrides = [flag.replace("-", "_") for flag in re.findall(r"--([a-z][a-z-]*(?:\.[a-z-]+)+)", page)]
        dotted = re.findall(rf"`((?:{tops})(?:\.[a-z_]+)+)`", page)
        named = [path for path in overrides + dotted if not path.endswith((".md", ".jsonl", ".py", ".toml"))]
        own = set(re.findall(r"\n +(\w+): ", page))  # fields of the page's own example classes
        named = [path for path in named if path.rpartition(".")[2] not in own]
        unknown += [f"{name}: {path}" for path in named if not any(has_field(config, path) for config in configs)]
    assert not unknown


def test_every_config_that_is_named_exists():
    named = {name for page in PAGES.values() for name in re.findall(r"`((?:debug|qwen3)_\w+)`", page)}
    assert named
    assert named <= set(config_functions())


def has_field(config, path: str) -> bool:
    """Whether `config` has the field, or a flag `no_...` of it; what lies in a part that is None counts as there."""
    for part in path.split("."):
        if config is None:
            return True
        part = part if hasattr(config, part) else part.removeprefix("no_")
        if not hasattr(config, part):
            return False
        config = getattr(config, part)
    return True


def anchors(page: str) -> set[str]:
    """The names by which links reach the headings of a page."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", page, flags=re.DOTALL), re.MULTILINE)
    names = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return names | set(re.findall(r'<a id="([^"]+)">', page))


def test_every_link_leads_to_a_file_and_a_heading():
    broken = []
    for name, page in PAGES.items():
        for link in re.findall(r"\]\(((?!http)[^)\s]+)\)", page):
            path, _, heading = link.partition("#")
            target = (ROOT / name).parent / path if path else ROOT / name
            if not target.exists() or (heading and heading not in anchors(target.read_text())):
                broken.append(f"{name}: {link}")
    assert not broken


def test_the_types_of_the_reading_page_exist():
    reading = (ROOT / "torchtitan_rl/READING.md").read_text()
    diagram = reading.partition("One sample, in the types")[2]
    named = set(re.findall(r"^(?:Group\[)?([A-Z]\w+)|(Member)\(", diagram, re.MULTILINE))
    assert {name for pair in named for name in pair if name} == {
        *("Prompt", "Completion", "ScoredCompletion", "Episode", "Member", "TrainBatch")
    }
    assert all(hasattr(types, a or b) for a, b in named)
