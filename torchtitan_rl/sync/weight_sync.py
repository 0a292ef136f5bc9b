"""Copies the policy's weights into the engine within the process and verifies that they arrived."""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torchtitan.config import Configurable

from torchtitan_rl import comm
from torchtitan_rl.device import ON_CPU
from torchtitan_rl.errors import TrainingStopped
from torchtitan_rl.fields.number import number
from torchtitan_rl.generator.generator import Generator
from torchtitan_rl.sync.probe import LARGEST_RATIO, distance, rounding_noise
from torchtitan_rl.sync.weight_proof import OTHER_VALUES, SIXTEENTHS, WeightProof
from torchtitan_rl.types import FloatArray, IntArray

Weights = Iterable[tuple[str, Tensor]]

PROOF_SHARE = 0.05 if ON_CPU else math.inf
"""Largest share of a step's time for the proof, unless a sixteenth of the tensors takes more. On a CPU, reading packed matrices
back takes longer than the push itself."""


class WeightSyncError(TrainingStopped):
    """After a sync, the engine's weights differ from the policy's, or it computes different log-probabilities with them."""


class WeightSync(Configurable):
    """Pushes weights, proves that they arrived, and probes regularly that both sides compute the same.

    The proof covers every tensor exactly. The probe covers what the proof cannot see: a different model, a different prefix
    of the vocabulary, a different rotary base. Three silent errors are avoided:

    - On a CPU, `load_weights` alone leaves the packed copies unchanged, so the engine's own layer-wise reload is used.
    - `reload_weights` without an iterator reloads the checkpoint on disk, so it always gets one.
    - Cached blocks of the old weights would be reused, so the prefix cache is dropped and checked to be empty.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        check_interval: int = number(50, least=0, remedy="0 probes the first push alone.")
        """Number of pushes from one probe to the next; 0 probes only the first push."""

        max_diff: float | None = number(
            None, least=0, remedy="Leave it out for no limit of one's own."
        )
        """Largest allowed difference of a probed token's log-probability. None: none. The difference is compared with the
        rounding noise of the policy in any case (`sync/probe.py`)."""

    def __init__(
        self, config: Config, *, proof: WeightProof, policy: nn.Module, dtypes: set[str]
    ) -> None:
        """`proof`: compares the engine's weights with the policy's after a push. `dtypes`: of trainer and engine."""
        self.config = config
        self._policy = policy
        self._dtype = torch.float32 if dtypes == {"float32"} else torch.bfloat16
        self._num_pushes = 0
        self._proof = proof
        self._next_share = 0
        self._sixteenth_s = 0.0  # seconds per sixteenth in the last proof
        self._ended_at = 0.0  # of the last push
        self._proven: dict[
            str, int
        ] = {}  # the policy version with which each tensor was last proven

    def push(
        self,
        weights: Weights,
        generator: Generator,
        *,
        policy_version: int,
        probe: IntArray,
        trainer_logprobs: Callable[[IntArray], FloatArray],
    ) -> int:
        """Load every weight into the engine and return their size in bytes. Collective, like the iterator.

        Args:
            weights: (Hugging Face name, full tensor in the generator's dtype) for every weight, tied ones under both names.
                It is consumed lazily, so it can gather one block at a time. Only the adapter if `generator.holds_base`.
            policy_version: recorded on every completion sampled after this push.
            probe: token ids [L] that both sides score when a probe is due.
            trainer_logprobs: computes the policy's log-probabilities of probe[1:], [L - 1].

        Raises:
            WeightSyncError: on every rank, naming the tensors, if the engine's weights differ from the policy's; or if the
                probe's log-probabilities differ.
        """
        sizes, base_is_due = {}, not generator.holds_base  # bytes of each sent tensor
        generator.load_weights(_counted(weights, sizes), policy_version=policy_version)
        interval = self.config.check_interval
        probes = self._num_pushes == 0 or (interval > 0 and self._num_pushes % interval == 0)
        shares = SIXTEENTHS if probes else self._shares_that_fit()
        self._check_arrival(generator, sizes, base_is_due, policy_version, shares)
        if probes:
            noise = rounding_noise(self._policy, trainer_logprobs, probe, self._dtype)
            self.check_probe(generator.prompt_logprobs(probe), trainer_logprobs(probe), noise)
        self._num_pushes += 1
        self._ended_at = time.monotonic()
        return sum(sizes.values())

    def _shares_that_fit(self) -> int:
        """Returns how many sixteenths fit into PROOF_SHARE of the time since the last push, at least 1. Collective."""
        room = PROOF_SHARE * (time.monotonic() - self._ended_at) / max(self._sixteenth_s, 1e-6)
        fits = int(max(1, min(SIXTEENTHS, room)))
        return -comm.largest(-fits)  # the least of all ranks

    def _check_arrival(
        self,
        generator: Generator,
        sent: Collection[str],
        base_is_due: bool,
        policy_version: int,
        shares: int,
    ) -> None:
        began = time.monotonic()
        due = self._proof.due(self._next_share, shares)
        wrong = self._proof.faults(sent if base_is_due else None, due=due)
        self._next_share += shares
        self._sixteenth_s = (time.monotonic() - began) / shares
        faults = [f"{name} {fault}" for name, fault in wrong.items()]
        faults += generator.lora.faults(sent) if generator.lora else []
        if cached := generator.num_cached_blocks():
            faults.append(f"the prefix cache kept {cached} blocks of the old weights")
        if not comm.largest(len(faults)):
            self._proven |= dict.fromkeys(due, policy_version)
            return
        # All ranks raise: if only one stopped, the others would wait for it.
        faults = list(dict.fromkeys(comm.all_gather_lists(faults)))
        proven = [
            self._proven[name]
            for name, fault in wrong.items()
            if fault == OTHER_VALUES and name in self._proven
        ]
        proven = comm.all_gather_lists(proven)
        raise WeightSyncError(
            f"Weight sync {self._num_pushes} left the engine with other weights than the policy's: {_first(faults)}. "
            f"{self._drift()}{_sampled_since(proven, policy_version)}"
        )

    def _drift(self) -> str:
        drifted = self._proof.drifted()
        if not drifted:
            return ""
        faults = [f"{name} {fault}" for name, fault in drifted.items()]
        return f"The policy's own replicas have drifted apart, the engine is not the cause: {_first(faults)}. "

    def evidence(self, generator: Generator) -> str:
        """Returns what the checksums say about the cause when engine and policy disagree after sampling. Collective."""
        if drift := self._drift():
            return drift.rstrip()
        if not ON_CPU:  # the engine is asleep
            return "Its weights were the policy's, bit for bit, when they were pushed."
        wrong = self._proof.faults(None)
        faults = list(
            dict.fromkeys(
                comm.all_gather_lists([f"{name} {fault}" for name, fault in wrong.items()])
            )
        )
        if not faults:
            return "Its weights are the policy's, bit for bit (compared now), so they are not the cause."
        proven = [self._proven[name] for name in wrong if name in self._proven]
        since = min(comm.all_gather_lists(proven), default=None)
        return f"Its weights are not the policy's (compared now): {_first(faults)}. {_last_proven(since)}".rstrip()

    def check_probe(self, of_engine: FloatArray, of_trainer: FloatArray, noise: float) -> None:
        """Raise WeightSyncError if engine and trainer compute different models.

        Args:
            of_engine, of_trainer: [L - 1] the log-probabilities of the probed tokens.
            noise: `rounding_noise` of the trainer.
        """
        largest, limit = (
            float(np.abs(of_engine - of_trainer).max(initial=0.0)),
            self.config.max_diff,
        )
        if limit is not None and not largest <= limit:
            raise _other_model(
                self._num_pushes, f"by {largest:.3g}, more than weight_sync.max_diff = {limit:.3g}"
            )
        ratio, highest = (
            distance(of_engine, of_trainer, self._dtype) / noise,
            LARGEST_RATIO[self._dtype],
        )
        if not ratio <= highest:
            raise _other_model(
                self._num_pushes,
                f"{ratio:.3g} times as much as rounding explains ({noise:.2g}); the limit is {highest:g} times",
            )


def _other_model(push: int, how_much: str) -> WeightSyncError:
    return WeightSyncError(
        f"After weight sync {push} the engine's log-probabilities of a fixed sequence differ from the trainer's {how_much}, "
        "although every weight arrived. They compute different models: check the rotary base, the norm epsilon, windows, logit "
        "scales and the order of rows in the checkpoint's conversion."
    )


def _first(faults: list[str]) -> str:
    more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
    return f"{'; '.join(faults[:3])}{more}"


def _last_proven(step: int | None) -> str:
    """Says which checkpoints are good if a tensor was last proven with the policy of `step`. "" if no push has proven it."""
    if step is None:
        return ""
    return f"They were last proven after step {step}: checkpoints up to step {step + 1} are good, later ones doubtful."


def _sampled_since(proven: list[int], policy_version: int) -> str:
    """Says what was sampled with weights that the push of `policy_version` finds wrong.

    Args:
        proven: for each wrong tensor, the policy version with which it was last proven.
    """
    step = min(proven, default=policy_version)
    steps = policy_version - step - 1
    if steps <= 0:
        return "Nothing was sampled with them."
    if max(proven) >= policy_version - 1:
        return "Some of them were proven right at the push before, so most likely nothing was sampled with them."
    trained = (
        f"the {steps} steps {step + 2} to {policy_version}"
        if steps > 1
        else f"step {policy_version}"
    )
    return f"{_last_proven(step)} Up to now, {trained} may have been trained on their samples: --resume {step + 1} or before."


def _counted(weights: Weights, sizes: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        sizes[name] = tensor.nbytes
        yield name, tensor
