"""What a run needs to go on exactly where it was: torchtitan's CheckpointManager with this project's own state."""

import json
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpointer import CheckpointManager

from torchtitan_rl.trainer.trainer import Trainer


class RunState(Stateful):
    """Small state, equal on every rank, by name: the step and whatever else has `state_dict` / `load_state_dict`.

    Stored as one JSON text, so that a part may gain or lose entries between versions without breaking a checkpoint.
    """

    def __init__(self, **parts: Any) -> None:
        self.step = 0
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        state = {name: part.state_dict() for name, part in self.parts.items()}
        return {"json": json.dumps({"step": self.step, **state})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = json.loads(state_dict["json"])
        self.step = state.pop("step")
        for name, part in self.parts.items():
            if name in state:
                part.load_state_dict(state[name])


def build_checkpointer(
    config: CheckpointManager.Config, *, trainer: Trainer, prompts: Stateful, run_state: RunState, dump_folder: str
) -> CheckpointManager:
    """Saves and restores model, optimizer, schedule, data position and `run_state`; loadable on other layouts."""
    return config.build(
        dataloader=prompts,
        model_parts=[trainer.model],
        optimizers=trainer.optimizer,
        lr_schedulers=trainer.scheduler,
        states={"train_state": run_state},
        sd_adapter=trainer.adapter,
        base_folder=dump_folder,
    )
