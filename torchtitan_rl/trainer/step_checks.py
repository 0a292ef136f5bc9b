"""What may stop an update: the gate, and numbers that are not finite."""

from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.models.common.decoder import Decoder

from torchtitan_rl.trainer.finite import FiniteUpdates
from torchtitan_rl.trainer.gate import LogprobGate
from torchtitan_rl.trainer.trainer_config import TrainerConfig


class StepChecks:
    """The checks of one trainer's updates, and what a resumed run needs to check as this one. Collective."""

    def __init__(
        self,
        config: TrainerConfig,
        dtypes: set[str],
        model: Decoder,
        optimizer: OptimizersContainer,
    ) -> None:
        """`dtypes`: those in which the trainer and the engine compute."""
        gate = LogprobGate(config.logprob_gate, dtypes=dtypes)
        finite = FiniteUpdates(model, optimizer, skip=config.skip_nonfinite_updates)
        self.check_logprobs = gate.check
        self.check_update = finite.check_update
        self.check_weights = finite.check_weights
        self.check_loaded = finite.check_loaded
        self.state_dict = gate.state_dict
        self.load_state_dict = gate.load_state_dict
