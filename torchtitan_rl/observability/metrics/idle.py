"""Says when nothing has been learnt for some steps: every group's rewards are equal, so loss and gradient are 0."""

from collections.abc import Sequence

from torchtitan_rl.core.events import progress
from torchtitan_rl.core.types import Episode, Group

AFTER_STEPS = 3
"""Steps in a row without a group that teaches; said again at 10 times as many."""


class IdleNotice:
    """Counts steps in which no group has completions of different reward."""

    def __init__(self) -> None:
        self._steps = 0

    def see(self, groups: Sequence[Group[Episode]]) -> None:
        """Look at one step's groups; the same on every rank."""
        taught = any(len(_rewards(group)) > 1 for group in groups)
        self._steps = 0 if taught else self._steps + 1
        if self._steps in (AFTER_STEPS, 10 * AFTER_STEPS):
            progress(
                f"nothing to learn from for {self._steps} steps: in no group do rewards differ. {likely_reason(groups)}"
            )


def likely_reason(groups: Sequence[Group[Episode]]) -> str:
    """Why no group's rewards differ, as far as the samples tell, and what to do."""
    samples = [episode for group in groups for episode in group.samples]
    if all(episode.reward is None for episode in samples):
        return "No completion has a reward: every reward function failed or gave none (grader.on_failure)."
    if all(len({episode.completion.text for episode in group.samples}) == 1 for group in groups):
        return "All completions of a prompt are the same text: raise sampling.temperature, or the policy has collapsed."
    if all(episode.completion.finish_reason == "length" for episode in samples):
        return "Every completion is cut off at sampling.max_tokens: raise it."
    if not any(episode.scored.correct for episode in samples):
        return "No completion is right: easier prompts, a better start, or look at what is sampled (torchtitan_rl.observability.samples)."
    if all(episode.scored.correct for episode in samples):
        return "Every completion is right: harder prompts."
    return "Each prompt is either always right or never: algorithm.zero_variance refill, or prompts in between."


def _rewards(group: Group[Episode]) -> set[float]:
    return {episode.reward for episode in group.samples if episode.reward is not None}
