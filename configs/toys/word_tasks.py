"""Writes a folder of tasks in Harbor's form: write a word into a file. `python -m torchtitan_rl.configs.toys.word_tasks FOLDER`."""

import sys
from pathlib import Path

WORDS = (
    "apple bread chair dream earth flame grape house island jelly knife lemon music night ocean paper queen river stone tiger "
    "uncle violin water yacht zebra angel beach cloud dance eagle"
)
FILES = ("word.txt", "note.txt", "name.txt", "list.txt")


def write_task(
    folder: Path, instruction: str, tests: str, solution: str, **files: str | None
) -> None:
    """Writes one task. `tests` and `solution` are bash; `files` has others by path, and replaces what a plain task has; None leaves it out."""
    parts = {
        "instruction.md": f"{instruction}\n",
        "task.toml": 'schema_version = "1.4"\n',
        "environment/Dockerfile": "FROM debian:12-slim\nWORKDIR /app\n",
        "tests/test.sh": f"#!/bin/bash\n{tests}\n",
        "solution/solve.sh": f"#!/bin/bash\n{solution}\n",
        **files,
    }
    for name, text in parts.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            file.write_text(text)


def check(test: str) -> str:
    """Tests that give 1 if a bash expression holds, else 0."""
    return f"if {test}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt"


def write_tasks(folder: Path) -> None:
    """Writes a task for each word and file: 120."""
    for word in WORDS.split():
        for name in FILES:
            request, same = (
                f"Write the word {word} into the file {name}.",
                f'[ "$(cat {name})" = {word} ]',
            )
            write_task(
                folder / f"{word}-{Path(name).stem}", request, check(same), f"echo {word} > {name}"
            )


if __name__ == "__main__":
    write_tasks(Path(sys.argv[1]))
