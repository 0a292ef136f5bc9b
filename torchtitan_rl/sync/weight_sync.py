"""Copies the policy's weights into the engine and proves that they arrived.

Checksums of the policy's shards are compared with those of the matrices that the engine computes with. The probe covers what
they cannot see: another model, such as one with a different rotary base.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torchtitan.config import TORCH_DTYPE_MAP, Configurable

from torchtitan_rl import comm
from torchtitan_rl.device import ON_CPU
from torchtitan_rl.errors import TrainingStopped
from torchtitan_rl.models.hf import exported_rows, hf_blocks
from torchtitan_rl.models.lora.adapters import Lora, adapter_rows
from torchtitan_rl.models.lora.lora_config import is_adapter
from torchtitan_rl.sync.engine_weights import Shapes
from torchtitan_rl.sync.in_process import OTHER_VALUES, InProcess, Weights
from torchtitan_rl.sync.other_ranks import OtherRanks
from torchtitan_rl.sync.probe import disagreement, rounding_noise
from torchtitan_rl.sync.shard_checksums import ShardChecksums
from torchtitan_rl.sync.sync_config import WeightSyncConfig
from torchtitan_rl.types import FloatArray, IntArray

if TYPE_CHECKING:
    from torchtitan_rl.trainer.trainer import Trainer

NOT_SENT = "was not sent"
NO_PLACE = "has no place in the engine"


class WeightSyncError(TrainingStopped):
    """After a sync, the engine's weights differ from the policy's, or it computes different log-probabilities with them."""


class WeightSync(Configurable):
    """Pushes weights, proves that they arrived, and probes that both sides compute the same.

    At every push all weights are compared but those that a CPU engine has packed. These are compared at the first push and
    every `check_interval` pushes; at the others, a CPU has the probe.
    """

    Config = WeightSyncConfig

    def __init__(
        self,
        config: WeightSyncConfig,
        *,
        trainer: "Trainer",
        connect: "Callable[[Lora | None, Shapes], InProcess | OtherRanks]",
        probe: IntArray,
    ) -> None:
        """
        Args:
            connect: returns the transport to the engines, for the shapes of the policy's weights.
            probe: [L] the tokens that both sides score.
        """
        self.config = config
        self._trainer, self._probe = trainer, probe
        model, names, lora = trainer.model, trainer.state_dict_adapter, trainer.lora
        adapter = adapter_rows(model, names) if lora else ()
        exported = chain(exported_rows(model, names), adapter)
        self._policy = ShardChecksums(exported, lora_scale=lora.scale if lora else 1.0)
        self._engine = connect(lora, self._policy.shapes)
        trained = TORCH_DTYPE_MAP[trainer.config.mixed_precision_param]
        same_float32 = trained == self._engine.dtype == torch.float32
        self._coarser = torch.float32 if same_float32 else torch.bfloat16
        self._num_pushes = 0
        self._noise = np.zeros(2)
        """`probe.rounding_noise`, [2], measured at full checks and again before a push is refused."""
        self._versions: list[int] = []
        """The policy versions pushed since the last full check, that one first. Step v + 1 samples with version v, and its
        checkpoint is step v + 1's."""

    def push(self, *, policy_version: int) -> int:
        """Copy the policy into the engine. Returns the bytes sent. With LoRA only the first push sends the base. Collective.

        Args:
            policy_version: recorded on every completion sampled after this push.

        Raises:
            WeightSyncError: on every rank, naming the tensors, if the engine's weights differ from the policy's; or if the
                probe's log-probabilities differ.
        """
        lora, interval = self._trainer.lora, self.config.check_interval
        sends_base = lora is None or self._num_pushes == 0
        sizes = self._engine.send(
            self.base_weights() if sends_base else None,
            [dict(lora.weights(self._engine.dtype))] if lora else (),
            policy_version=policy_version,
        )
        in_full = self._num_pushes % interval == 0 if interval else self._num_pushes == 0
        self._check_arrival(self._missing(sizes, sends_base=sends_base), in_full=in_full)
        if in_full or ON_CPU:
            self._check_probe(in_full=in_full)
        self._num_pushes += 1
        if in_full:
            self._versions = []
        self._versions.append(policy_version)
        return sum(sizes.values())

    def base_weights(self) -> Weights:
        """The policy's weights but adapters', gathered while they are read. Collective."""
        trainer, dtype = self._trainer, self._engine.dtype
        as_forward = dtype == TORCH_DTYPE_MAP[trainer.config.mixed_precision_param]
        # With one rank there is nothing to gather, and FSDP would copy each weight twice.
        whole_blocks = as_forward and trainer.parallel_dims.dp_shard > 1
        names = trainer.state_dict_adapter
        return hf_blocks(trainer.model, names, dtype, whole_blocks=whole_blocks)

    def evidence(self) -> str:
        """Returns what the checksums say about the cause when engine and policy disagree after sampling. Collective."""
        if drift := self._drift():
            return drift.rstrip()
        if self._engine.asleep:
            return "Its weights were the policy's, bit for bit, when they were pushed."
        wrong = self._other_values(packed=True)
        faults = self._faults(wrong, {})
        if not faults:
            return "Its weights are the policy's, bit for bit (compared now), so they are not the cause."
        since = _good_until(self._since_compared(wrong)[0])
        return f"Its weights are not the policy's (compared now): {_first(faults)}. {since}"

    def _missing(self, sent: Collection[str], *, sends_base: bool) -> dict[str, str]:
        """Returns {name: fault} of tensors that were not sent, or for which the engine has no adapter."""
        missing: dict[str, str] = {}
        copies_of_names = self._engine.copies(packed=True).tolist()
        for name, copies in zip(self._policy.shapes, copies_of_names, strict=True):
            if is_adapter(name) and not copies:
                missing[name] = NO_PLACE
            elif (sends_base or is_adapter(name)) and copies and name not in sent:
                missing[name] = NOT_SENT
        return missing

    def _check_arrival(self, missing: dict[str, str], *, in_full: bool) -> None:
        """Raise on every rank if any rank's engine has other weights."""
        wrong = self._other_values(packed=in_full)
        if faults := self._faults(wrong, missing):
            raise WeightSyncError(
                f"Weight sync {self._num_pushes} left the engine with other weights than the policy's: {_first(faults)}. "
                f"{self._drift()}{self._sampled_with(wrong)}"
            )

    @torch.no_grad()
    def _other_values(self, *, packed: bool) -> list[str]:
        """Returns the names of the tensors whose checksums differ in any engine. Collective.

        Args:
            packed: also compare the matrices that a CPU engine has packed.
        """
        # [names] in each engine, on its ranks together
        copies = self._engine.copies(packed=packed)
        due = set(copies.nonzero().flatten().tolist())
        of_policy = self._policy.checksums(self._engine.dtype, due)  # [names] this rank's part
        dist.all_reduce(of_policy)
        of_engines = self._engine.checksums(packed=packed)  # [engines, names]
        differs = (of_engines != of_policy.cpu() * copies).any(0).tolist()  # [names]
        return [name for name, other in zip(self._policy.shapes, differs, strict=True) if other]

    def _faults(self, wrong: list[str], missing: dict[str, str]) -> list[str]:
        """Returns a sentence for each fault of any rank's engine, the same on every rank. Collective."""
        faults = self._engine.faults() | dict.fromkeys(wrong, OTHER_VALUES) | missing
        sentences = [f"{name} {fault}" for name, fault in faults.items()]
        return list(dict.fromkeys(comm.all_gather_lists(sentences)))

    def _check_probe(self, *, in_full: bool) -> None:
        """Raise on every rank if any rank's engine computes something else: because of other weights, or another model.

        The noise is measured at full checks, and again before a push is refused: it may have grown since. It is refused if also
        the sequences that begin at the probe's other thirds differ. In some a rounding error moves all later tokens together,
        which few draws do not show.
        """
        for begin in range(0, len(self._probe), -(-len(self._probe) // 3)):
            ids = np.roll(self._probe, -begin)
            exact = self._trainer.token_logprobs(ids)  # [L - 1]
            answers = self._engine.logprobs(probe=ids)  # [L - 1] each
            if not in_full and begin == 0 and not self._disagreement(answers, exact):
                return
            self._noise = rounding_noise(
                self._trainer.model,
                partial(self._trainer.token_logprobs, ids),
                exact,
                self._coarser,
            )
            difference = self._disagreement(answers, exact)
            if not difference:
                return
        if not in_full:
            self._check_arrival({}, in_full=True)
        raise WeightSyncError(
            f"After weight sync {self._num_pushes} the engine's log-probabilities of a fixed sequence differ from the trainer's "
            f"{difference}, although every weight arrived. They compute different models: check the rotary base, the norm "
            "epsilon, windows, logit scales and the order of rows in the checkpoint's conversion."
        )

    def _disagreement(self, answers: Sequence[FloatArray], exact: FloatArray) -> str:
        """Returns by how much an engine differs too much; "" if none does. [L - 1] each. Collective."""
        noise, dtype = self._noise, self._coarser
        differences = [disagreement(answer, exact, noise, dtype) for answer in answers]
        return next(filter(None, comm.all_gather_lists(differences)), "")

    def _drift(self) -> str:
        """Says which of the policy's replicas are unequal, with a space at the end; else "". Collective."""
        faults = self._policy.drifted(self._engine.dtype)
        if not faults:
            return ""
        return f"The policy's own replicas have drifted apart, the engine is not the cause: {_first(faults)}. "

    def _since_compared(self, wrong: Collection[str]) -> list[int]:
        """Returns the versions pushed since these tensors were last compared, that one first; [] before the first push.

        Packed matrices are compared at full checks, all others and the engine's constants (`wrong` is empty) at every push.
        """
        copies_of_names = self._engine.copies(packed=False).tolist()
        compared = zip(self._policy.shapes, copies_of_names, strict=True)
        packed = {name for name, copies in compared if copies == 0}
        return self._versions if wrong and packed.issuperset(wrong) else self._versions[-1:]

    def _sampled_with(self, wrong: Collection[str]) -> str:
        """Says which steps may have sampled with tensors that a push finds `wrong`."""
        proven, *unproven = self._since_compared(wrong) or [0]
        if unproven:
            return (
                f"{_good_until(proven)} Up to now, steps {unproven[0] + 1} to {unproven[-1] + 1} may have been trained on their "
                f"samples: --resume {proven + 1} or before."
            )
        if len(self._versions) < 2:
            return "Nothing was sampled with them."
        return "Some were right at the push before, so most likely nothing was sampled with them."


def _good_until(version: int) -> str:
    return f"They were last proven after step {version}: checkpoints up to step {version + 1} are good, later ones doubtful."


def _first(faults: list[str]) -> str:
    more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
    return f"{'; '.join(faults[:3])}{more}"
