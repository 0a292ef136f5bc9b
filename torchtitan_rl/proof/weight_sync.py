"""Copies the policy's weights into the engine within the process and verifies that they arrived."""

import statistics
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
from torchtitan_rl.proof.weight_proof import WeightProof

Weights = Iterable[tuple[str, Tensor]]

PROVE_EVERY = 16 if ON_CPU else 1
"""Number of pushes per full proof; the first push is proven in full. On a CPU, reading packed matrices back takes longer than
the push itself."""

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
        self._check_arrival(generator, sizes, base_is_due)
        interval = self.config.check_interval
        if self._num_pushes == 0 or (interval and self._num_pushes % interval == 0):
            self._check_probe(generator.prompt_logprobs(probe), trainer_logprobs(probe), generator.dtype)
        self._num_pushes += 1
        return sum(sizes.values())

    def _check_arrival(self, generator: Generator, sent: Collection[str], base_is_due: bool) -> None:
        faults = self._proof.faults(sent if base_is_due else None, in_full=self._num_pushes % PROVE_EVERY == 0)
        faults += generator.adapter.faults(sent) if generator.adapter else []
        if cached := generator.num_cached_blocks():
            faults.append(f"the prefix cache kept {cached} blocks of the old weights")
        if not comm.largest(len(faults)):
            return
        # All ranks raise: if only one stopped, the others would wait for it.
        faults = list(dict.fromkeys(comm.all_gather_lists(faults)))
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise WeightSyncError(
            f"Weight sync {self._num_pushes} left the engine with other weights than the policy's: "
            f"{'; '.join(faults[:3])}{more}. Nothing was sampled with them."
        )

    def _check_probe(self, engine: FloatArray, trainer: FloatArray, dtype: torch.dtype) -> None:
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


def _counted(weights: Weights, sizes: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        sizes[name] = tensor.nbytes
        yield name, tensor
