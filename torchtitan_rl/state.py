"""The small state of a run that checkpoints hold beside the tensors."""

import json
from collections.abc import Sequence
from typing import Any

from torchtitan_rl.trainer.optimizer import UpdateReport
from torchtitan_rl.types import Episode, Group


class RunState:
    """The step, the counters, and parts with `state_dict` and `load_state_dict`. Equal on every rank.

    Stored as one JSON text, so that parts can gain or lose entries between versions without breaking checkpoints.
    """

    COUNTERS = ("step", "optimizer_steps", "prompts_seen", "tokens_seen")

    def __init__(self, **parts: Any) -> None:
        self.step = self.optimizer_steps = self.prompts_seen = self.tokens_seen = 0
        self.parts = parts
        self.state_dict()  # a part whose state is no JSON would otherwise end the run at a checkpoint

    def count(self, groups: Sequence[Group[Episode]], update: UpdateReport) -> None:
        """Add a step to the counters."""
        self.optimizer_steps += update.optimizer_steps
        self.prompts_seen += len(groups)
        self.tokens_seen += update.trained_tokens

    def state_dict(self) -> dict[str, Any]:
        """The counters and the parts' states, as JSON under "json"."""
        state = {name: getattr(self, name) for name in self.COUNTERS}
        for name, part in self.parts.items():
            state[name] = part.state_dict()
        return {"json": json.dumps(state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. A part that it lacks keeps its state."""
        state = json.loads(state_dict["json"])
        for name in self.COUNTERS:
            setattr(self, name, state[name])
        for name, part in self.parts.items():
            if name in state:
                part.load_state_dict(state[name])
