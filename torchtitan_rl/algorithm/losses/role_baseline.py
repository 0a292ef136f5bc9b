"""SPIRAL's baseline for each task and role."""

from dataclasses import dataclass
from typing import Any

from torchtitan_rl.algorithm.losses.modifier import OwnBaseline
from torchtitan_rl.fields.number import number
from torchtitan_rl.summary import same_everywhere
from torchtitan_rl.types import Episode, Group, Metric


class RoleBaseline(OwnBaseline):
    """A_i = r_i - b, then b <- decay b + (1 - decay) r_i, one b for each task and role. SPIRAL's RAE, arXiv 2506.24119.

    b starts at 0 and covers all earlier samples, in the order of prompts and samples. The group is no baseline, so a role that
    always wins has advantages near 0 as well.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OwnBaseline.Config):
        column: str = "role"
        """The prompt's column with the role; a prompt without it has the role ""."""
        decay: float = number(0.95, least=0, below=1)
        """Weight of b in the next b."""

    zero_without_advantage = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.baselines: dict[str, float] = {}

    def assign_credit(self, groups: list[Group[Episode]]) -> None:
        for group in groups:
            task, columns = group.prompt.task, group.prompt.columns
            column = columns.get(self.config.column, "")
            role = f"{task}/{column}".strip("/")  # such as "poker/first"
            for episode in group.samples:
                reward = episode.credit.shaped_reward
                if reward is None:
                    continue
                baseline = self.baselines.get(role, 0.0)
                episode.credit.advantage = reward - baseline
                decay = self.config.decay
                self.baselines[role] = decay * baseline + (1 - decay) * reward
        super().assign_credit(groups)

    def group_metrics(self, groups: list[Group[Episode]]) -> dict[str, Metric]:
        metrics = super().group_metrics(groups)
        for role, baseline in self.baselines.items():
            metrics[f"role_baseline/{role or 'all'}"] = same_everywhere(baseline)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"baselines": dict(self.baselines)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.baselines = dict(state["baselines"])
