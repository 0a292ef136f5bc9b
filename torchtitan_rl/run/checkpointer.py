"""Saves and loads checkpoints of everything that a run needs to continue bit by bit, and keeps the configured number."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.config import Configurable

from torchtitan_rl import comm
from torchtitan_rl.errors import TrainingStopped, UserError, expect
from torchtitan_rl.events import progress
from torchtitan_rl.run import manifest, safe_load
from torchtitan_rl.run.checkpoint_folder import CheckpointFolder
from torchtitan_rl.run.checkpointer_config import CheckpointerConfig
from torchtitan_rl.sync.shard_checksums import base_digest
from torchtitan_rl.trainer.trainer import Trainer

ROOM = 1.02
"""Bytes on the disk for each byte of tensors. The rest is the index and the small values."""


def policy_state(model: nn.Module) -> dict[str, Tensor]:
    """Every trained parameter by its plain name; tied ones once. A frozen base is not stored.

    They are the sharded tensors themselves, so that saving and loading copy nothing. In torchtitan's own wrapper each rank would
    hold a whole float32 copy of the fused query, key and value weights (5.5 GiB for 14B).
    """
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return {canonical_fqn(name): p.detach() for name, p in trained}


class Checkpointer(Configurable):
    """Saves and loads model, optimizer, schedule, data position and the run's state. Another layout of ranks can load them."""

    Config = CheckpointerConfig

    def __init__(
        self,
        config: CheckpointerConfig,
        *,
        trainer: Trainer,
        prompts: Stateful,
        run_state: Stateful,
        run_folder: Path,
        config_fields: dict[str, Any] | None = None,
        check_folder: Callable[[], None] = lambda: None,
        more_tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        """
        Args:
            more_tensors: what is saved and loaded beside the policy, by name.
            config_fields: the run's config by dotted field, stored in each manifest. A resumed run is compared with it.
            check_folder: raises TrainingStopped if the run folder is gone. Called after every step.
        """
        self.config = config
        self.folder = CheckpointFolder(run_folder)
        self.config_fields = config_fields or {}
        self._check_folder = check_folder
        self._more_tensors = more_tensors or {}
        self.model = trainer.model
        self.states = {
            "optimizer": trainer.optimizer,
            "dataloader": prompts,
            "lr_scheduler": trainer.scheduler,
            "train_state": run_state,
        }
        self._base = base_digest(trainer.model, trainer.state_dict_adapter) if trainer.lora else ""
        self._best = self.folder.best()
        self._overdue_since: int | None = None
        self._has_begun = False

    def check_room(self) -> None:
        """Raise UserError, on rank 0, if the disk has no room for even one checkpoint, without what a killed start has left."""
        if not (self.config.enable and comm.is_rank_0()):
            return
        self.folder.clean()
        missing = self.folder.missing_bytes(self._bytes())
        expect(
            missing <= 0, "dump_folder", str(self.folder.path), f"room for a checkpoint of {self._bytes():,} bytes, but "
            f"{missing:,} bytes are missing", "Make room, or pass --dump-folder on another disk.",
        )  # fmt: skip

    def load(self, checkpoint: Path) -> None:
        """Restore everything from a verified checkpoint folder. Collective.

        Raises UserError if its tensors are not this run's, or its adapter belongs to another base.
        """
        base = manifest.read(checkpoint).get("base", "")
        expect(
            base == self._base, "hf_assets_path", f"a base with digest {self._base or 'none: all weights are trained'}",
            f"the base of {checkpoint}, with digest {base or 'none: it stores all weights'}",
            "Its adapter was trained on that one: start from the same folder with the same trainer.mixed_precision_param.",
        )  # fmt: skip
        with _explained(f"{checkpoint} cannot be loaded", UserError):
            safe_load.load(self._state(), checkpoint)

    def keep_best(self, step: int) -> None:
        """Have `save` save `step`, the current one, and keep it besides the newest ones, in place of the former best."""
        self._best = step

    def save(self, step: int, *, last_step: bool = False) -> bool:
        """Save a checkpoint if one is due. Returns whether it was saved. If the disk is full, the next step tries again. Collective.

        Called after every step. The first call sets later checkpoints aside: a start that fails before leaves all as it was.

        Raises TrainingStopped, on every rank, if the folder is gone, or if the disk is still full after another interval or
        at the last step.
        """
        self._check_folder()
        self._set_later_aside(step)
        due = last_step or step % self.config.interval == 0 or step == self._best
        if not (self.config.enable and (due or self._overdue_since is not None)):
            return False
        try:
            self._write(step)
        except CannotSaveError as error:
            self._postpone(step, str(error), last_step)
            return False
        self._overdue_since = None
        return True

    def _set_later_aside(self, step: int) -> None:
        """After the first step, set the checkpoints aside that an earlier start of this run saved at this step or later."""
        if comm.is_rank_0() and not self._has_begun:
            for path in self.folder.set_aside_from(step):
                progress(f"later step kept as {path.name}: this run went on from an earlier one")
        self._has_begun = True

    def _postpone(self, step: int, reason: str, last_step: bool) -> None:
        since = step if self._overdue_since is None else self._overdue_since
        stops = since + self.config.interval
        kept = f"The newest checkpoint is {self.folder.newest() or 'none'}"
        if last_step or step >= stops:
            raise TrainingStopped(f"step {step} cannot be saved: {reason}. {kept}.")
        if self._overdue_since is None:
            again = f"tried again after each step, until step {stops}"
            progress(f"step {step} is not saved: {reason}. {kept}; {again}")
        self._overdue_since = since

    def _write(self, step: int) -> None:
        missing = comm.broadcast(self.folder.missing_bytes(self._bytes()))
        if missing > 0:
            lacks = f"lacks {missing:,} bytes ({missing / 2**30:.2f} GiB)"
            raise CannotSaveError(f"the disk of {self.folder.path} {lacks}")
        unfinished = self._on_rank_0(lambda: self.folder.begin(step))
        try:
            with _explained("writing it failed (is the disk or a quota full?)", CannotSaveError):
                dcp.save(self._state(), checkpoint_id=str(unfinished))
            files_by_rank = self._everywhere(lambda: manifest.describe(_files_of_rank(unfinished)))
            files = {name: entry for files in files_by_rank for name, entry in files.items()}
            self._on_rank_0(lambda: self._finish(step, files))
        except CannotSaveError:
            self._on_rank_0(lambda: shutil.rmtree(unfinished, ignore_errors=True))
            raise

    def _finish(self, step: int, files: dict[str, dict[str, Any]]) -> None:
        about = {"step": step, "world_size": dist.get_world_size(), "base": self._base}
        about["config"] = self.config_fields
        self.folder.finish(step, files, about, is_best=step == self._best)
        self.folder.purge(self.config.keep_latest_k)

    def _state(self) -> dict[str, Any]:
        return {**self.states, **policy_state(self.model), **self._more_tensors}

    def _bytes(self) -> int:
        """Estimated size of a checkpoint: the weights of all ranks and two moments of each."""
        weights = sum(w.numel() * w.element_size() for w in policy_state(self.model).values())
        more = sum(t.numel() * t.element_size() for t in self._more_tensors.values())
        return int(ROOM * (3 * weights + more))

    def _on_rank_0(self, act: Callable[[], Any]) -> Any:
        """Run `act` on rank 0. Returns its result on every rank; raises CannotSaveError on every rank if it fails."""
        return self._everywhere(act if dist.get_rank() == 0 else lambda: None)[0]

    def _everywhere(self, act: Callable[[], Any]) -> list[Any]:
        """Run `act` on every rank. Returns all results in rank order; raises CannotSaveError on every rank if one fails."""
        try:
            mine = (act(), "")
        except OSError as error:
            mine = (None, f"rank {dist.get_rank()}: {error}")
        results = comm.all_gather_lists([mine])
        if failed := [error for _, error in results if error]:
            raise CannotSaveError("; ".join(failed))
        return [result for result, _ in results]


class CannotSaveError(Exception):
    """A rank could not write its part of a checkpoint. Earlier checkpoints are untouched."""


@contextmanager
def _explained(what: str, error_type: type[Exception]) -> Iterator[None]:
    """Replace DCP's CheckpointException, which quotes the tracebacks of all ranks, by an error that names the first cause."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        while cause.__context__ is not None:
            cause = cause.__context__
        raise error_type(f"{what}: rank {rank}: {type(cause).__name__}: {cause}") from error


def _files_of_rank(folder: Path) -> list[Path]:
    """The files that this rank wrote: DCP names them by rank. Rank 0 also wrote the index."""
    rank = dist.get_rank()
    return sorted(folder.glob(f"__{rank}_*")) + ([folder / ".metadata"] if rank == 0 else [])
