"""Teachers whose log-probabilities of the sampled tokens the loss reads (`algorithm.losses.distillation.Distill`)."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_rl.algorithm.losses.loss import TEACHER_LOGPROBS
from torchtitan_rl.errors import expect
from torchtitan_rl.trainer.teachers.hints import Hints
from torchtitan_rl.trainer.trainer import Trainer
from torchtitan_rl.types import Episode, Group, flat


@dataclass(eq=False)
class Teachers:
    """Several models, each for the rows that name it in their column `teacher`, a `Source`. MOPD, MiMo-V2-Flash,
    arXiv 2601.02780."""

    by_name: "Mapping[str, Teacher]"
    """That of rows without the column is ""."""
    name = "teacher"

    def add_logprobs(self, groups: Sequence[Group[Episode]]) -> None:
        """Set every episode's token column as its teacher does. Collective: every rank has all groups."""
        groups_of: dict[str, list[Group[Episode]]] = {name: [] for name in self.by_name}
        expected = f"one of {sorted(self.by_name)}, which teacher and more_teachers name"
        remedy = "Correct the row, or add the teacher."
        for group in groups:
            name = group.prompt.columns.get("teacher") or ""
            expect(name in groups_of, "the column teacher", name, expected, remedy)
            groups_of[name].append(group)
        for name, teacher in self.by_name.items():
            teacher.add_logprobs(groups_of[name])


@dataclass(eq=False)
class Teacher:
    """A model of the policy's vocabulary, a `Source`."""

    trainer: Trainer
    model: Decoder
    hints: Hints | None = None
    """What it reads more than the policy."""
    is_base: bool = False
    """Whether it is the policy without its adapters."""
    name = "teacher"

    @classmethod
    def of_folder(
        cls, trainer: Trainer, model_spec: ModelSpec, folder: Path, hints: Hints | None = None
    ) -> "Teacher":
        """Load a folder's weights, sharded as the policy's. With LoRA on the same folder it is the base. Collective."""
        if trainer.lora is not None and folder.samefile(trainer.loader.folder):
            return cls(trainer, trainer.model, hints, is_base=True)
        return cls(trainer, trainer.loader.frozen(model_spec, folder), hints)

    def add_logprobs(self, groups: Sequence[Group[Episode]]) -> None:
        """Set every episode's token column `teacher_logprobs` to log nu of its tokens, [L]. Collective."""
        with self.trainer.lora.off(self.model) if self.is_base else nullcontext():
            hinted = self.hints.groups(groups) if self.hints else groups
            logprobs = self.trainer.episode_logprobs(self.model, hinted)
        for episode, values in zip(flat(hinted), logprobs, strict=True):
            episode.credit.token_columns[TEACHER_LOGPROBS] = values
