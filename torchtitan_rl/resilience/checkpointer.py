"""Checkpoints of everything a run needs to go on exactly where it was: whole, verified, and no more of them than asked for."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.config import Configurable

from torchtitan_rl.core import comm
from torchtitan_rl.core.config import number
from torchtitan_rl.core.errors import TrainingStopped, UserError, expect
from torchtitan_rl.core.events import progress
from torchtitan_rl.core.trainer.trainer import Trainer
from torchtitan_rl.resilience import manifest, safe_load
from torchtitan_rl.resilience.checkpoint_folder import CheckpointFolder

ROOM = 1.02
"""Bytes on the disk for a byte of tensors: the index and the small values are beside them."""


class PolicyState:
    """The model's parameters as a checkpoint's state: the sharded tensors themselves, so that saving and loading copy nothing.

    torchtitan's own wrapper keeps its first state dict, and with it a whole float32 copy of every layer's query, key and
    value weights on each rank (5.5 GiB for 14B): they are stored fused and split by a hook that gathers them. Here they
    stay fused, as the optimizer's state of them is.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Tensor]:
        """Every parameter under its plain name; tied ones once."""
        return {canonical_fqn(name): p.detach() for name, p in self.model.named_parameters()}


class Checkpointer(Configurable):
    """Saves and restores model, optimizer, schedule, data position and the run's state; loadable on other layouts."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        enable: bool = True
        """Save checkpoints. A run without them cannot be resumed."""

        interval: int = number(50, least=1, remedy="Use 50; checkpoint.enable False saves none.")
        """Steps between checkpoints; the last step of a run, and of a stopped one, is always saved."""

        keep_latest_k: int = number(2, least=0, remedy="Use 2; 0 keeps all.")
        """Checkpoints that are kept, the newest; the best one by evaluation stays beside them. 0: all."""

    def __init__(
        self,
        config: Config,
        *,
        trainer: Trainer,
        prompts: Stateful,
        run_state: Stateful,
        run_folder: Path,
        described: dict[str, Any] | None = None,
        check_folder: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            described: the run's config as told to users, kept in each manifest for what resumes from it.
            check_folder: raises TrainingStopped when the run folder is gone; called after every step.
        """
        self.config = config
        self.folder = CheckpointFolder(run_folder)
        self.described = described or {}
        self._check_folder = check_folder
        self.model = PolicyState(trainer.model)
        self.states = {
            "optimizer": trainer.optimizer,
            "dataloader": prompts,
            "lr_scheduler": trainer.scheduler,
            "train_state": run_state,
        }
        self._best = self.folder.best()
        self._overdue_since: int | None = None

    def check_room(self) -> None:
        """Raise UserError, on rank 0, when the disk cannot take even one checkpoint: before hours are spent on what it loses."""
        missing = self.folder.missing_bytes(self._bytes()) if self.config.enable and comm.is_rank_0() else 0
        expect(
            missing <= 0, "dump_folder", str(self.folder.path), f"room for a checkpoint of {self._bytes():,} bytes, but "
            f"{missing:,} bytes are missing", "Make room, or pass --dump-folder on another disk.",
        )  # fmt: skip

    def load(self, checkpoint: Path) -> None:
        """Restore everything from a verified checkpoint folder. Collective.

        Raises:
            UserError: where its tensors are not this run's.
        """
        with _explained(f"{checkpoint} cannot be loaded", UserError):
            safe_load.load(self._state(), checkpoint)

    def keep_best(self, step: int) -> None:
        """Save the checkpoint of `step`, the current one, and keep it, in place of the former best, beyond keep_latest_k."""
        self._best = step

    def save(self, step: int, *, last_step: bool = False) -> bool:
        """Save when due; whether it is saved. Without room on the disk it is tried again after each step. Collective.

        Raises:
            TrainingStopped: on every rank, when the folder is gone, or when there is still no room after another
                interval or at the last step.
        """
        self._check_folder()
        due = last_step or step % self.config.interval == 0 or step == self._best or self._overdue_since is not None
        if not (self.config.enable and due):
            return False
        try:
            self._write(step)
        except CannotSaveError as error:
            self._postpone(step, str(error), last_step)
            return False
        self._overdue_since = None
        return True

    def _postpone(self, step: int, reason: str, last_step: bool) -> None:
        since = step if self._overdue_since is None else self._overdue_since
        stops = since + self.config.interval
        kept = f"The newest checkpoint is {self.folder.newest() or 'none'}"
        if last_step or step >= stops:
            raise TrainingStopped(f"step {step} cannot be saved: {reason}. {kept}.")
        if self._overdue_since is None:
            progress(f"step {step} is not saved: {reason}. {kept}; tried again after each step, until step {stops}")
        self._overdue_since = since

    def _write(self, step: int) -> None:
        state = self._state()
        missing = comm.broadcast(self.folder.missing_bytes(self._bytes()))
        if missing > 0:
            raise CannotSaveError(f"the disk of {self.folder.path} lacks {missing:,} bytes ({missing / 2**30:.2f} GiB)")
        unfinished = self._on_rank_0(lambda: self.folder.begin(step))
        try:
            with _explained("writing it failed", CannotSaveError):
                dcp.save(state, checkpoint_id=str(unfinished))
            described = self._everywhere(lambda: manifest.describe(_files_of_rank(unfinished)))
            files = {name: entry for of_rank in described for name, entry in of_rank.items()}
            about = {"step": step, "world_size": dist.get_world_size(), "config": self.described}
            self._on_rank_0(lambda: self._finish(step, files, about))
        except CannotSaveError:
            self._on_rank_0(lambda: shutil.rmtree(unfinished, ignore_errors=True))
            raise

    def _finish(self, step: int, files: dict[str, dict[str, Any]], about: dict[str, Any]) -> None:
        self.folder.finish(step, files, about)
        if step == self._best:
            self.folder.mark_best(step)
        self.folder.purge(self.config.keep_latest_k)

    def _state(self) -> dict[str, Any]:
        return {**self.states, **self.model.state_dict()}

    def _bytes(self) -> int:
        """About what a checkpoint takes on the disk: the weights of all ranks, a sharded one whole, and two moments of each."""
        weights = self.model.state_dict().values()
        return int(ROOM * 3 * sum(w.numel() * w.element_size() for w in weights))

    def _on_rank_0(self, act: Callable[[], Any]) -> Any:
        """What `act` returns on rank 0, on every rank, which all fail when it fails."""
        return self._everywhere(act if dist.get_rank() == 0 else lambda: None)[0]

    def _everywhere(self, act: Callable[[], Any]) -> list[Any]:
        """What `act` returns on each rank, in rank order. Raises CannotSaveError on every rank when one cannot."""
        try:
            mine = (act(), "")
        except OSError as error:
            mine = (None, f"rank {dist.get_rank()}: {error}")
        results = comm.all_gather_lists([mine])
        if failed := [error for _, error in results if error]:
            raise CannotSaveError("; ".join(failed))
        return [result for result, _ in results]


class CannotSaveError(Exception):
    """A checkpoint could not be written, on any rank; what was there before is untouched."""


@contextmanager
def _explained(what: str, error_type: type[Exception]) -> Iterator[None]:
    """Turn DCP's failure, a BaseException that quotes the tracebacks of all ranks, into one that names the first cause."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        while cause.__context__ is not None:
            cause = cause.__context__
        # What a full disk looks like from another rank, to which an exception comes without its cause.
        torn = "a file could not be written to its end, as on a full disk or over a quota: "
        hint = torn if "unexpected pos" in str(cause) else ""
        raise error_type(f"{what}: rank {rank}: {hint}{type(cause).__name__}: {cause}") from error


def _files_of_rank(folder: Path) -> list[Path]:
    """What this rank wrote, which DCP names by it; rank 0 the index too."""
    rank = dist.get_rank()
    return sorted(folder.glob(f"__{rank}_*")) + ([folder / ".metadata"] if rank == 0 else [])
