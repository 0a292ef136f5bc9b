"""A run's checkpoints as folders on the disk: which there are, how one comes to be and goes, and which one to resume from."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_rl.core.errors import UserError, expect
from torchtitan_rl.resilience import manifest

BEST = "best.json"
UNFINISHED, LEAVING, ASIDE = ".writing-", ".deleting-", "set-aside-"

Examine = Callable[[Path], str]
"""What is wrong with a checkpoint folder, "" for nothing."""


class CheckpointFolder:
    """RUN/checkpoint: `step-N` are whole checkpoints; whatever is half written or half deleted has another name.

    Only rank 0 calls what changes it.
    """

    def __init__(self, run_folder: Path) -> None:
        self.path = run_folder / "checkpoint"

    def steps(self) -> dict[int, Path]:
        """Every finished checkpoint by its step, oldest first; damaged ones too."""
        found = [(re.fullmatch(r"step-(\d+)", p.name), p) for p in self.path.glob("step-*")]
        return dict(sorted((int(match[1]), path) for match, path in found if match))

    def newest(self) -> Path | None:
        """The finished checkpoint of the highest step, if any."""
        return next(reversed(self.steps().values()), None)

    def missing_bytes(self, needed: int) -> int:
        """How many of `needed` bytes the file system has no room for; 0 or less when they fit."""
        existing = next(folder for folder in (self.path, *self.path.parents) if folder.exists())
        return needed - shutil.disk_usage(existing).free

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of `step` into. What was left unfinished or half deleted goes."""
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"the run folder {self.path.parent} has vanished")
        for prefix in (UNFINISHED, LEAVING):
            for leftover in self.path.glob(f"{prefix}*"):
                shutil.rmtree(leftover, ignore_errors=True)
        folder = self.path / f"{UNFINISHED}step-{step}"
        folder.mkdir(parents=True)
        return folder

    def finish(self, step: int, files: dict[str, dict[str, Any]], about: dict[str, Any]) -> None:
        """Write the manifest of what `begin` gave and all ranks have written, and give it its final name."""
        unfinished, final = self.path / f"{UNFINISHED}step-{step}", self.path / f"step-{step}"
        manifest.write(unfinished, files, **about)
        self._delete(final)
        unfinished.rename(final)
        manifest.sync_folder(self.path)

    def purge(self, keep_latest_k: int) -> None:
        """Delete all but the newest `keep_latest_k` and the best; 0 keeps all."""
        steps = self.steps()
        for step in list(steps)[:-keep_latest_k] if keep_latest_k else []:
            if step != self.best():
                self._delete(steps[step])

    def best(self) -> int | None:
        """The step of the checkpoint that is kept as the best, if any."""
        try:
            return json.loads((self.path / BEST).read_text())["step"]
        except (OSError, ValueError, KeyError):
            return None

    def mark_best(self, step: int) -> None:
        """Keep the checkpoint of `step` through every purge, in place of the former best."""
        new = self.path / f"{BEST}.new"
        new.write_text(json.dumps({"step": step}) + "\n")
        new.replace(self.path / BEST)

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename the checkpoints of later steps, from which nothing resumes any more; returns their new names."""
        later = [path for number, path in self.steps().items() if number > step]
        return [path.rename(_free_name(path.with_name(ASIDE + path.name))) for path in later]

    def _delete(self, folder: Path) -> None:
        if folder.exists():  # under another name first: a kill in the middle must not leave half a checkpoint
            leaving = folder.rename(folder.with_name(LEAVING + folder.name))
            shutil.rmtree(leaving, ignore_errors=True)  # what a network file system still holds goes with the next


@dataclass(frozen=True)
class Resume:
    """What a run starts from."""

    checkpoint: Path
    step: int
    fork: bool
    """Whether it is another run's: the data position and all weights are taken over, its metrics and samples are not."""
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that could not be used, each with the reason."""


def is_choice(resume: str) -> bool:
    """Whether it is auto, never or a step, and so no folder."""
    return resume in ("auto", "never") or resume.isdecimal()


def find_resume(resume: str, run_folder: Path, examine: Examine) -> Resume | None:
    """What `resume` (auto, never, a step, or another run's folder or checkpoint) stands for; None: a new run.

    Own checkpoints come before another run's, so that a forked run that was interrupted goes on by the same command.

    Raises:
        UserError: naming every checkpoint looked at and why it cannot be used.
    """
    own = CheckpointFolder(run_folder)
    if resume == "never":
        expect(
            not own.steps(), "resume", resume, f"a run folder without checkpoints, but {run_folder} has {list(own.steps())}",
            "Pass another --dump-folder, or --resume auto to go on.",
        )  # fmt: skip
        return None
    if resume.isdecimal():
        return _chosen_step(own, int(resume), examine)
    if resume == "auto" or own.steps():
        return _newest_good(own.steps(), examine, fork=False) if own.steps() else None
    return _forked(Path(resume), examine)


def _chosen_step(own: CheckpointFolder, step: int, examine: Examine) -> Resume:
    steps = own.steps()
    there = f"one of {list(steps)}" if steps else "none yet, so leave it out"
    expect(step in steps, "resume", step, f"a step with a checkpoint in {own.path}: {there}", "Or use auto.")
    reason = examine(steps[step])
    expect(
        not reason, "resume", step, f"a whole checkpoint, but of {steps[step]} {reason}", "Use auto or another step."
    )
    return Resume(steps[step], step, fork=False)


def _forked(source: Path, examine: Examine) -> Resume:
    steps = CheckpointFolder(source).steps()
    if re.fullmatch(r"(set-aside-)?step-\d+", source.name):
        steps = {int(source.name.rpartition("-")[2]): source} if source.is_dir() else {}
    expect(
        bool(steps), "resume", str(source), "auto, never, a step, or the folder of another run or of one of its checkpoints",
        "Name an existing one.",
    )  # fmt: skip
    return _newest_good(steps, examine, fork=True)


def _newest_good(steps: dict[int, Path], examine: Examine, *, fork: bool) -> Resume:
    skipped: list[str] = []
    for step, path in reversed(steps.items()):
        reason = examine(path)
        if not reason:
            return Resume(path.resolve(), step, fork, tuple(skipped))
        skipped.append(f"{path.name}: {reason}")
    raise UserError(
        f"no checkpoint in {path.parent} can be used: {'; '.join(skipped)}. Pass --resume with another run's checkpoint, or "
        "another --dump-folder for a new run."
    )


def _free_name(path: Path) -> Path:
    number = 2
    free = path
    while os.path.lexists(free):
        free = path.with_name(f"{path.name}-{number}")
        number += 1
    return free
