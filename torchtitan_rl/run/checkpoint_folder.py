"""A run's checkpoint folders: listing, creating and deleting them, and choosing the one to resume from."""

import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_rl.errors import UserError, expect
from torchtitan_rl.run import manifest

BEST = "best.json"
UNFINISHED, LEAVING, ASIDE = ".writing-", ".deleting-", "set-aside-"
_STEP = re.compile(r"step-(\d+)")


class CheckpointFolder:
    """RUN/checkpoint. Folders named `step-N` are whole checkpoints; unfinished and half deleted ones have other names.

    Only rank 0 calls the methods that change it.
    """

    def __init__(self, run_folder: Path) -> None:
        self.path = run_folder / "checkpoint"

    def steps(self) -> dict[int, Path]:
        """Finished checkpoints by step, oldest first, including damaged ones."""
        names = {path: _STEP.fullmatch(path.name) for path in self.path.glob("step-*")}
        return dict(sorted((int(name[1]), path) for path, name in names.items() if name))

    def newest(self) -> Path | None:
        """The finished checkpoint of the highest step; None if there is none."""
        return next(reversed(self.steps().values()), None)

    def missing_bytes(self, needed: int) -> int:
        """The number of the `needed` bytes that do not fit the file system; 0 or less if all fit."""
        existing = next(folder for folder in (self.path, *self.path.parents) if folder.exists())
        return needed - shutil.disk_usage(existing).free

    def clean(self) -> None:
        """Delete unfinished and half deleted checkpoints, as a kill leaves them."""
        for prefix in (UNFINISHED, LEAVING):
            for leftover in self.path.glob(f"{prefix}*"):
                shutil.rmtree(leftover, ignore_errors=True)

    def begin(self, step: int) -> Path:
        """Create an empty folder for the checkpoint of `step`, after `clean`."""
        self.clean()
        folder = self.path / f"{UNFINISHED}step-{step}"
        self.path.mkdir(exist_ok=True)  # fails if the run's folder has vanished
        folder.mkdir()
        return folder

    def finish(
        self,
        step: int,
        files: dict[str, dict[str, Any]],
        about: dict[str, Any],
        *,
        is_best: bool = False,
    ) -> None:
        """Write the manifest of a folder from `begin` that all ranks have filled, and give it its final name."""
        unfinished, final = self.path / f"{UNFINISHED}step-{step}", self.path / f"step-{step}"
        manifest.write(unfinished, files, **about)
        if is_best:  # first, or a kill in between would let `purge` delete it later
            self.mark_best(step)
        self._delete(final)
        unfinished.rename(final)
        manifest.sync_folder(self.path)

    def purge(self, keep_latest_k: int) -> None:
        """Delete all checkpoints but the newest `keep_latest_k` and the best; 0 keeps all."""
        steps = self.steps()
        for step in list(steps)[:-keep_latest_k] if keep_latest_k else []:
            if step != self.best():
                self._delete(steps[step])

    def best(self) -> int | None:
        """The step of the checkpoint that is kept as the best; None if there is none."""
        try:
            return json.loads((self.path / BEST).read_text())["step"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def mark_best(self, step: int) -> None:
        """Exempt the checkpoint of `step` from `purge`, in place of the former best."""
        new = self.path / f"{BEST}.new"
        new.write_text(json.dumps({"step": step}) + "\n")
        new.replace(self.path / BEST)

    def set_aside_from(self, step: int) -> list[Path]:
        """Rename the checkpoints of `step` and later ones, so that `auto` no longer finds them. Returns their new paths."""
        later = [path for number, path in self.steps().items() if number >= step]
        return [path.rename(_free_name(path.with_name(ASIDE + path.name))) for path in later]

    def _delete(self, folder: Path) -> None:
        if folder.exists():
            # Renamed first: a kill in the middle must not leave half a checkpoint under its name. `begin` deletes what a network
            # file system still holds.
            leaving = folder.rename(folder.with_name(LEAVING + folder.name))
            shutil.rmtree(leaving, ignore_errors=True)


def _free_name(path: Path) -> Path:
    number, free = 2, path
    while os.path.lexists(free):
        free = path.with_name(f"{path.name}-{number}")
        number += 1
    return free


@dataclass(frozen=True)
class Resume:
    """The checkpoint that a run starts from."""

    checkpoint: Path
    step: int
    fork: bool
    """Whether it is another run's. Its weights and data position are taken over, its metrics and samples are not."""
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that cannot be used, each with the reason."""
    changed: dict[str, str] = field(default_factory=dict)
    """Fields of the config that are not the checkpoint's. Example: {"seed": "0 -> 1"}"""


CHOICES = "auto, never, a step such as 40, or the folder of another run or of a checkpoint"


def is_choice(resume: str) -> bool:
    return resume in ("auto", "never") or resume.isdecimal()


def check_form(resume: str) -> None:
    """Raise UserError for a text that is neither a choice nor a path: a wrong one would be taken for a folder that is gone."""
    is_path = os.sep in resume or (resume != "" and Path(resume).is_dir())
    expect(is_choice(resume) or is_path, "resume", resume, CHOICES, "auto takes the newest.")


def find_resume(resume: str, run_folder: Path) -> Resume | None:
    """Find the checkpoint for `resume`: auto, never, a step, or another run's folder or checkpoint. Returns None for a new run.

    The run's own checkpoints come before those of the run that it was forked from, so that the same command continues an
    interrupted fork.

    Raises UserError, naming every checkpoint that was checked and why it cannot be used.
    """
    check_form(resume)
    own = CheckpointFolder(run_folder)
    steps = own.steps()
    if resume == "never":
        expected = f"a run folder without checkpoints, but {run_folder} has {list(steps)}"
        remedy = "Pass another --dump-folder, or --resume auto to go on."
        expect(not steps, "resume", resume, expected, remedy)
        return None
    if resume.isdecimal():
        there = f"a step with a checkpoint in {own.path}: {list(steps) or 'there is none yet'}"
        expect(int(resume) in steps, "resume", resume, there, "Or use auto.")
        return _newest_good({int(resume): steps[int(resume)]}, fork=False)
    if resume == "auto":
        return _newest_good(steps, fork=False) if steps else None
    source = Path(resume).resolve()
    if not steps:
        steps = checkpoints_at(source)
        expect(bool(steps), "resume", str(source), CHOICES, "There is no checkpoint at that place.")
        return _newest_good(steps, fork=True)
    if source.parent == own.path.resolve() and (name := _STEP.fullmatch(source.name)):
        return find_resume(name[1], run_folder)
    expected = f"auto or one of {list(steps)}: {run_folder} was not forked from there"
    remedy = "Pass another --dump-folder to fork into."
    holds = source == run_folder.resolve() or _was_forked(run_folder, source)
    expect(holds, "resume", resume, expected, remedy)
    return _newest_good(steps, fork=False)


def _was_forked(run_folder: Path, source: Path) -> bool:
    """Whether one of the run's starts forked from `source`, by the configs that it has kept (config-1.json, ...)."""
    for file in run_folder.glob("config*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            resume = json.loads(file.read_text())["resume"]
            if not is_choice(resume) and Path(resume).resolve() == source:
                return True
    return False


def checkpoints_at(source: Path) -> dict[int, Path]:
    """The checkpoints of a run's folder by step, oldest first, or the only one that `source` is."""
    name = re.fullmatch(r"step-(\d+)(?:-\d+)?", source.name.removeprefix(ASIDE))  # as `_free_name`
    return {int(name[1]): source} if name and source.is_dir() else CheckpointFolder(source).steps()


def _newest_good(steps: dict[int, Path], *, fork: bool) -> Resume:
    skipped: list[str] = []
    for step, path in reversed(steps.items()):
        reason = manifest.examine(path)
        if not reason:
            return Resume(path.resolve(), step, fork, tuple(skipped))
        skipped.append(f"{path.name}: {reason}")
    raise UserError(
        f"no checkpoint in {path.parent} can be used: {'; '.join(skipped)}. Pass another --resume, or another --dump-folder for a "
        "new run."
    )
