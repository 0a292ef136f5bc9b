"""torchtitan's CheckpointManager over everything a run needs to go on exactly where it was."""

from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpointer import CheckpointManager

from torchtitan_rl.trainer.trainer import Trainer


def build_checkpointer(
    config: CheckpointManager.Config, *, trainer: Trainer, prompts: Stateful, run_state: Stateful, dump_folder: str
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
