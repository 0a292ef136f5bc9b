"""The teacher of `ExactDistill`: each forward of the policy reads the divergence from it at the head."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchtitan.models.common.decoder import Decoder

from torchtitan_rl.algorithm.losses.distillation import DIVERGENCE
from torchtitan_rl.algorithm.losses.loss import TEACHER_TOKEN
from torchtitan_rl.models.divergence import TeacherOutput, chunked_divergence
from torchtitan_rl.models.score import HeadInput, HeadReader, forget_forwards, run_model
from torchtitan_rl.trainer.logprob_diff import keep_columns, share_measurements
from torchtitan_rl.trainer.teachers.hints import Hints
from torchtitan_rl.trainer.trainer import Trainer
from torchtitan_rl.types import Episode, Group, TrainBatch


@dataclass(eq=False)
class ExactTeacher:
    """A model without gradients, sharded as the policy, or the policy itself. The policy's forward reads the divergence from it."""

    trainer: Trainer
    model: Decoder
    hints: Hints | None = None
    """What it reads more than the policy."""
    columns = (DIVERGENCE, TEACHER_TOKEN)
    """What it measures of each token."""

    @property
    def is_policy(self) -> bool:
        """Whether the policy teaches itself."""
        return self.model is self.trainer.model

    @torch.no_grad()
    def reader(self, batch: TrainBatch) -> HeadReader:
        """Run the teacher's forward. Its head stays gathered until `free`, so that the student's backward can read it; the
        policy's own is the student's."""
        temperature = self.trainer.temperature
        hinted = self.hints.batch(batch, self.trainer.batcher.multiple) if self.hints else batch

        def read(head_input: HeadInput) -> TeacherOutput:
            hidden = head_input.hidden.index_select(0, hinted.loss_positions)  # [M, Dt]
            return TeacherOutput(hidden, head_input.weight, temperature / head_input.scale)

        teacher = run_model(self.model, hinted.token_ids, hinted.layout, read)
        if not self.is_policy:
            self.model.lm_head.unshard()  # with fsdp_reshard_after_forward "always" it is no longer gathered
        beta = self.trainer.algorithm.policy_loss.divergence_beta

        def read_both(head_input: HeadInput) -> dict[str, Tensor]:
            own = teacher._replace(weight=head_input.weight.detach()) if self.is_policy else teacher
            weight, known = _shared_rows(head_input.weight, own)  # [Vs', D]
            divergence, best = chunked_divergence(
                head_input.hidden,
                weight,
                known,
                beta=beta,
                temperature=temperature / head_input.scale,
                chunk_tokens=self.trainer.model.lm_head.config.chunk_tokens,
                group=head_input.group,
                first_row=head_input.first_row,
            )
            return {DIVERGENCE: divergence, TEACHER_TOKEN: best}

        return read_both

    def free(self) -> None:
        if not self.is_policy:
            forget_forwards(self.model)

    @torch.no_grad()
    def measure(self, groups: Sequence[Group[Episode]]) -> dict[str, float]:
        """Returns the mean divergence over sampled tokens. Collective. The episodes keep the columns of their tokens."""
        trainer = self.trainer
        if self.hints:
            self.hints.add_logprobs(groups)
        total = count = 0.0
        for batch in trainer.batcher.microbatches(groups):
            scores = trainer.score(batch, self.reader(batch))  # [T] each
            keep_columns(batch, scores.at(batch.loss_positions).each(Tensor.cpu).columns)
            total += float((scores.columns[DIVERGENCE] * batch.loss_mask).sum())
            count += float(batch.loss_mask.sum())
            forget_forwards(trainer.model)
        self.free()
        share_measurements(groups, self.columns, mine=trainer.is_tp_leader)
        return {DIVERGENCE: trainer.sum(total) / max(trainer.sum(count), 1.0)}


def _shared_rows(weight: Tensor, teacher: TeacherOutput) -> tuple[Tensor, TeacherOutput]:
    """The rows of the vocabulary that both heads have. A head may be padded with rows of no token, and a family's
    sizes are padded differently."""
    rows = min(len(weight), len(teacher.weight))
    if rows < len(weight):
        weight = weight[:rows]
    return weight, teacher._replace(weight=teacher.weight[:rows])
