"""The command that started a run, as its folder has it."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from torchtitan_rl.errors import UserError, expect
from torchtitan_rl.fields.references import CALLER_FOLDER
from torchtitan_rl.run.secrets import HIDDEN

_OWN = ("--dump-folder", "--resume", "--eval-only")
"""Options that say where a run is written, how it begins, and that it does not train."""


def options_of_run(folder: str, replaced: Sequence[str] = ()) -> list[str]:
    """Returns options with which `train` makes the run of `folder` again, there, without those that are `replaced`.

    Relative paths start where they did. Raises UserError if no command line started the run, or a secret is left, which is not stored.
    """
    config = Path(folder, "config.json").resolve()
    try:
        stored = json.loads(config.read_text())
        (program, *options), start = stored["command"], stored["folder_of_command"]
    except (OSError, ValueError, KeyError):
        fault = "is not a run's" if config.exists() else "is not there"
        remedy = f"{config} {fault}. A config's start is evaluated with --config NAME."
        raise UserError(f"RUN = {folder!r}: expected a run's folder. {remedy}") from None
    by_command = Path(program).parts[-2:] == ("command", "train.py")
    remedy = "A script's run has evaluations of its own: see evaluation.every."
    expect(by_command, "RUN", folder, "a run that a command line started", remedy)
    os.environ[CALLER_FOLDER] = start
    kept = _without(options, {*_OWN, *map(_name, replaced)})
    hidden = next((word for word in kept if HIDDEN in word), "")
    remedy = "Give its option again, with the secret."
    expect(not hidden, "RUN", folder, f"options without secrets, but it has {hidden}", remedy)
    return [*kept, "--dump-folder", str(config.parent)]


def _without(options: Sequence[str], names: set[str]) -> list[str]:
    """Returns the options but those of these names, each with the values that follow it."""
    kept, keeps = [], True
    for word in options:
        if word.startswith("--"):
            keeps = _name(word) not in names
        if keeps:
            kept.append(word)
    return kept


def _name(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")
