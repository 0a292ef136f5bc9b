"""Copies the policy's weights into the engine within the process and verifies that they arrived."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torchtitan.config import Configurable

from torchtitan_rl.core import comm
from torchtitan_rl.core.config import number
from torchtitan_rl.core.device import ON_CPU
from torchtitan_rl.core.errors import TrainingStopped
from torchtitan_rl.core.generator.generator import Generator
from torchtitan_rl.core.types import FloatArray, IntArray
from torchtitan_rl.proof.weight_proof import OTHER_VALUES, SIXTEENTHS, WeightProof

Weights = Iterable[tuple[str, Tensor]]

PROOF_SHARE = 0.05 if ON_CPU else math.inf
"""Largest share of a step's time for the proof, unless a sixteenth of the tensors takes more. On a CPU, reading packed matrices
back takes longer than the push itself."""

MAX_DIFF = {torch.float32: 1e-4, torch.bfloat16: 0.5}
"""Largest allowed difference of a probed token's log-probability before the run has its own statistics. In float32 it is about
1e-6. In bfloat16 the two implementations round differently, by tenths for unlikely tokens."""

NOISE_FACTOR = 20.0
"""A difference above this multiple of the median of the run's own probes is an error."""


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

        max_diff: float | None = number(None, least=0, remedy="Leave it out for the dtype's own.")
        """Largest allowed difference of a probed token's log-probability. None means 1e-4 for a float32 engine and 0.5 for a
        bfloat16 engine. After the third probe, 20 times the median of the run's own probes applies if that is less."""

    def __init__(self, config: Config, *, proof: WeightProof) -> None:
        """`proof`: compares the engine's weights with the policy's after a push."""
        self.config = config
        self._num_pushes = 0
        self._proof = proof
        self._next_share = 0
        self._sixteenth_s = 0.0  # seconds per sixteenth in the last proof
        self._ended_at = 0.0  # of the last push
        self._proven: dict[str, int] = {}  # the policy version with which each tensor was last proven
        self._probes: deque[float] = deque(maxlen=20)

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
            self.check_probe(generator.prompt_logprobs(probe), trainer_logprobs(probe), generator.dtype)
        self._num_pushes += 1
        self._ended_at = time.monotonic()
        return sum(sizes.values())

    def _shares_that_fit(self) -> int:
        """Returns how many sixteenths fit into PROOF_SHARE of the time since the last push, at least 1. Collective."""
        room = PROOF_SHARE * (time.monotonic() - self._ended_at) / max(self._sixteenth_s, 1e-6)
        fits = int(max(1, min(SIXTEENTHS, room)))
        return -comm.largest(-fits)  # the least of all ranks

    def _check_arrival(
        self, generator: Generator, sent: Collection[str], base_is_due: bool, policy_version: int, shares: int
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
        proven = [self._proven[name] for name, fault in wrong.items() if fault == OTHER_VALUES and name in self._proven]
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
        faults = list(dict.fromkeys(comm.all_gather_lists([f"{name} {fault}" for name, fault in wrong.items()])))
        if not faults:
            return "Its weights are the policy's, bit for bit (compared now), so they are not the cause."
        proven = [self._proven[name] for name in wrong if name in self._proven]
        since = min(comm.all_gather_lists(proven), default=None)
        return f"Its weights are not the policy's (compared now): {_first(faults)}. {_last_proven(since)}".rstrip()

    def check_probe(self, engine: FloatArray, trainer: FloatArray, dtype: torch.dtype) -> None:
        """Compare the log-probabilities of both sides, each [L - 1]."""
        diff = float(np.abs(engine - trainer).max(initial=0.0))
        limit, whose = MAX_DIFF[dtype] if self.config.max_diff is None else self.config.max_diff, "weight_sync.max_diff"
        if len(self._probes) >= 3:
            noise = max(NOISE_FACTOR * statistics.median(self._probes), MAX_DIFF[dtype] / 10)
            if noise < limit:
                limit, whose = noise, f"{NOISE_FACTOR:g} x the median of the last {len(self._probes)} probes"
        if not diff <= limit:
            raise WeightSyncError(
                f"After weight sync {self._num_pushes} the engine's log-probabilities of a fixed sequence differ from the "
                f"trainer's by {diff:.3g}, more than {whose} = {limit:.3g}, although every weight arrived. They compute different "
                "models: check the rotary base, the norm epsilon, windows, logit scales and the order of rows in the checkpoint's conversion."
            )
        self._probes.append(diff)


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
    trained = f"the {steps} steps {step + 2} to {policy_version}" if steps > 1 else f"step {policy_version}"
    return f"{_last_proven(step)} Up to now, {trained} may have been trained on their samples: --resume {step + 1} or before."


def _counted(weights: Weights, sizes: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        sizes[name] = tensor.nbytes
        yield name, tensor
