"""torchtitan's CheckpointManager over everything a run needs to go on exactly where it was."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.utils import canonical_fqn

from torchtitan_rl.run.errors import expect
from torchtitan_rl.trainer.trainer import Trainer

MODEL = "model"
"""torchtitan's name of the model among a checkpoint's states."""


class PolicyState:
    """The model's parameters as a checkpoint's state: the sharded tensors themselves, so that saving and loading copy nothing.

    torchtitan's own wrapper keeps its first state dict, and with it a whole float32 copy of every layer's query, key and
    value weights on each rank (5.5 GiB for 14B): they are stored fused and split by a hook that gathers them. Here they
    stay fused, as the optimizer's state of them is.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Tensor]:
        """Every parameter under its plain name; tied ones once."""
        return {canonical_fqn(name): p.detach() for name, p in self.model.named_parameters()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing is left to do: DCP reads into the tensors that `state_dict` gave it."""


def build_checkpointer(
    config: CheckpointManager.Config, *, trainer: Trainer, prompts: Stateful, run_state: Stateful, dump_folder: str
) -> CheckpointManager:
    """Saves and restores model, optimizer, schedule, data position and `run_state`; loadable on other layouts.

    Raises:
        UserError: for a Hugging Face format, which `hf_assets_path` reads and scripts/export_hf.py writes.
    """
    for field, remedy in (
        ("initial_load_in_hf", "Pass the folder as --hf-assets-path."),
        ("last_save_in_hf", "Export with scripts/export_hf.py."),
    ):
        expect(not getattr(config, field), f"checkpoint.{field}", getattr(config, field), "False", remedy)
    manager = config.build(
        dataloader=prompts,
        model_parts=[],
        optimizers=trainer.optimizer,
        lr_schedulers=trainer.scheduler,
        states={"train_state": run_state},
        sd_adapter=None,
        base_folder=dump_folder,
    )
    if config.enable:
        manager.states[MODEL] = PolicyState(trainer.model)
    return manager
