"""What may stop an update: the gate, and numbers that are not finite."""

from collections.abc import Sequence

from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.models.common.decoder import Decoder

from torchtitan_rl.core.trainer.trainer_config import TrainerConfig
from torchtitan_rl.core.types import FloatArray
from torchtitan_rl.proof.finite import FiniteUpdates
from torchtitan_rl.proof.gate import LogprobDiffs, LogprobGate


class StepChecks:
    """The checks of one trainer's updates: `core.trainer.trainer.UpdateChecks`."""

    def __init__(self, config: TrainerConfig, dtypes: set[str], model: Decoder, optimizer: OptimizersContainer) -> None:
        """`dtypes`: those in which the trainer and the engine compute."""
        self._gate = LogprobGate(config.logprob_gate, dtypes=dtypes)
        finite = FiniteUpdates(model, optimizer, skip=config.skip_nonfinite_updates)
        self.allows = finite.allows
        self.check_weights = finite.check_weights
        self.check_loaded = finite.check_loaded
        self.state_dict = self._gate.state_dict
        self.load_state_dict = self._gate.load_state_dict

    def check_logprobs(self, differences: Sequence[FloatArray]) -> None:
        """Raise LogprobGateError if trainer and sampler disagree on any rank. `differences`: [tokens] each."""
        diffs = LogprobDiffs()
        for values in differences:
            diffs.add(values)
        self._gate.check(diffs.merged())
