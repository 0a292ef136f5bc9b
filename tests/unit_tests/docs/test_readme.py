"""README and docs: every command, field, config and file that is named exists."""

import re
import shlex
from pathlib import Path

import pytest

from torchtitan_rl import types
from torchtitan_rl.command.registry import config_functions, load_config, parse_args

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
PAGES = {page.name: page.read_text() for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
PAGE = "".join(PAGES.values())
SHOWN = ("--help", "--list-configs", "--print-config", "--dry-run")
LAUNCHERS = ("run_train.sh", "torchtitan_rl.train", "scripts/multinode_train.slurm")


@pytest.fixture
def here(files):
    """A folder with examples/, tests/ and the Python blocks of all pages."""
    for name in ("examples", "tests"):
        (files / name).symlink_to(ROOT / name)


def commands() -> list[tuple[str, str]]:
    """(page, arguments) of every command line that starts a run."""
    found = []
    for name, page in PAGES.items():
        lines = [line for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) for line in _lines(block)]
        for line in lines + re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL)):
            words = shlex.split(line.partition(" > ")[0], comments=True) if line.count("'") % 2 == 0 else []
            for i, word in enumerate(words):
                if word.removeprefix("./") in LAUNCHERS and "..." not in words:
                    found.append((name, shlex.join(words[i + 1 :])))
    return found


def _lines(block: str) -> list[str]:
    return block.replace("\\\n", " ").splitlines()


@pytest.mark.parametrize(("page", "arguments"), commands())
def test_documented_command_lines_parse(here, page, arguments):
    args = [arg for arg in shlex.split(arguments) if arg not in SHOWN]
    assert parse_args(args)[1].num_steps >= 1


def test_every_field_that_is_named_exists():
    configs = [load_config(name) for name in config_functions()]
    tops = "|".join(configs[0].to_dict())
    unknown = []
    for name, page in PAGES.items():
        page = page.replace("algorithm.loss.fraction", "")  # of the example's own loss
        page = re.sub(r"^\| `--[^|]*", "", page, flags=re.MULTILINE)  # rows of wrong inputs
        overrides = [flag.replace("-", "_") for flag in re.findall(r"--([a-z][a-z-]*(?:\.[a-z-]+)+)", page)]
        dotted = re.findall(rf"`((?:{tops})(?:\.[a-z_]+)+)`", page)
        named = [path for path in overrides + dotted if not path.endswith((".md", ".jsonl", ".py"))]
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


def test_the_types_of_the_reading_page_and_the_files_of_the_readme_exist():
    reading = (ROOT / "torchtitan_rl/READING.md").read_text()
    diagram = reading.partition("One sample, in the types")[2]
    named = set(re.findall(r"^(?:Group\[)?([A-Z]\w+)|(Member)\(", diagram, re.MULTILINE))
    assert {name for pair in named for name in pair if name} == {
        *("Prompt", "Completion", "ScoredCompletion", "Episode", "Member", "TrainBatch")
    }
    assert all(hasattr(types, a or b) for a, b in named)
    for path in re.findall(r"\]\(((?!http)[^)#]+)\)", README):
        assert (ROOT / path).exists(), path
