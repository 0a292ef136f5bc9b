"""Copy the policy's weights into the engine, in process, and check that both then say the same."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from torchtitan.config import Configurable

from torchtitan_rl.generator.generator import Generator
from torchtitan_rl.run.errors import TrainingStopped
from torchtitan_rl.types import FloatArray, IntArray

Weights = Iterable[tuple[str, Tensor]]


class WeightSyncError(TrainingStopped):
    """After a sync, trainer and engine disagree about a fixed sequence."""


class WeightSync(Configurable):
    """Pushes weights and, on the first push and then every `check_interval`, probes that they arrived.

    Ways to sync and be silently wrong that are closed here: the engine's own layer-wise reload is used, because on a CPU
    `load_weights` alone leaves the packed copies as they were; an iterator is always given, because `reload_weights`
    without one reloads the checkpoint on disk; the prefix cache is dropped; and the probe sees a weight that was left out.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        check_interval: int = 50
        """Pushes between two probes; 0 probes only the first."""

        max_diff: float = 1e-4
        """Largest allowed difference of a probed token's log-probability. About 1e-6 is seen in float32; use 0.5 with
        bfloat16, whose rounding differs between two implementations by tenths on unlikely tokens."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._num_pushes = 0

    def push(
        self,
        weights: Weights,
        generator: Generator,
        *,
        policy_version: int,
        probe: IntArray,
        trainer_logprobs: Callable[[IntArray], FloatArray],
    ) -> int:
        """Load every weight into the engine and return their bytes; collective, like the iterator.

        Args:
            weights: (Hugging Face name, full tensor in the generator's dtype), all of them, tied ones under both names.
                Consumed lazily, so it may gather one block at a time.
            policy_version: recorded on every completion sampled from here on.
            probe: token ids [L] that both sides score when a check is due.
            trainer_logprobs: the policy's log-probability of probe[1:], [L - 1].

        Raises:
            WeightSyncError: when the probe differs by more than `max_diff`.
        """
        sizes: list[int] = []  # bytes of each
        generator.load_weights(_counted(weights, sizes), policy_version=policy_version)
        interval = self.config.check_interval
        if self._num_pushes == 0 or (interval and self._num_pushes % interval == 0):
            self._check(generator.prompt_logprobs(probe), trainer_logprobs(probe))
        self._num_pushes += 1
        return sum(sizes)

    def _check(self, engine: FloatArray, trainer: FloatArray) -> None:
        """Both [L - 1]."""
        diff = float(np.abs(engine - trainer).max(initial=0.0))
        if not diff <= self.config.max_diff:
            raise WeightSyncError(
                f"After weight sync {self._num_pushes} the engine's log-probabilities of a fixed sequence differ from the "
                f"trainer's by {diff:.3g}, over weight_sync.max_diff {self.config.max_diff:.3g}: a weight did not arrive, "
                "or the two implementations of the model differ."
            )


def _counted(weights: Weights, sizes: list[int]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        sizes.append(tensor.nbytes)
        yield name, tensor
