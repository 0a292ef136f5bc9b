"""Reports steps without a learning signal: all advantages are 0, as where the rewards of every group are equal."""

import logging
from collections.abc import Sequence

from torchtitan_rl.comm import is_rank_0
from torchtitan_rl.errors import TrainingStopped
from torchtitan_rl.types import Episode, Group, flat

logger = logging.getLogger(__name__)

AFTER_STEPS = (1, 3, 30)
"""Numbers of consecutive steps without a learning signal at which the message is printed."""


class IdleNotice:
    """Counts consecutive steps in which no completion in the loss has an advantage, and prints a message."""

    def __init__(self) -> None:
        self._steps = self._seen = 0
        self._rewarded = False

    def see(self, groups: Sequence[Group[Episode]]) -> None:
        """Counts one step, given all its groups with their advantages, which are equal on every rank."""
        self._seen += 1
        self._rewarded |= any(episode.reward is not None for episode in flat(groups))
        taught = any(e.in_loss and e.credit.has_advantage for e in flat(groups))
        self._steps = 0 if taught else self._steps + 1
        if self._steps in AFTER_STEPS and is_rank_0():
            count = f"{self._steps} step{'s' * (self._steps > 1)}"
            logger.warning(
                f"no learning signal for {count}: every advantage is 0. {likely_reason(groups)} "
                "torchtitan-rl report RUN shows the samples."
            )

    def check_rewarded(self) -> None:
        """Raise TrainingStopped if there were steps, and no completion of them had a reward: the run is no success."""
        if self._seen and not self._rewarded:
            raise TrainingStopped(
                f"no completion of {self._seen} steps had a reward, so nothing was learned: every reward function failed or "
                "returned None, or the environment or agent of every conversation failed. extra/error/<function> and "
                "extra/error/environment in the samples say what failed."
            )


def likely_reason(groups: Sequence[Group[Episode]]) -> str:
    """The likely reason why no group has different rewards, judged from the samples, and the remedy."""
    samples = [episode for group in groups for episode in group.samples]
    if all(episode.reward is None for episode in samples):
        return "No completion has a reward: every reward function failed or returned None (grader.on_failure)."
    if all(len({episode.completion.text for episode in group.samples}) == 1 for group in groups):
        return "All completions of each prompt are identical: raise sampling.temperature, or the policy has collapsed."
    if all(episode.completion.finish_reason == "length" for episode in samples):
        return "Every completion is truncated at sampling.max_tokens: raise it."
    judged = any(episode.scored.correct is not None for episode in samples)
    if judged and all(episode.scored.answer is None for episode in samples):
        return (
            "No completion has an answer in the form that the task reads (the format rate is 0): ask for it in the prompts "
            "(prompts.system_prompt, prompts.few_shot or --task.template), or read another form (--task.answer-kind)."
        )
    if not judged:
        equal = next(e.reward for e in samples if e.reward is not None)
        return (
            f"The rewards of each prompt's completions are equal, such as {equal:g}: use harder or easier prompts, or add a reward that "
            "tells them apart (--grader.rewards)."
        )
    if not any(episode.scored.correct for episode in samples):
        return (
            "No completion is correct: use easier prompts or a better initial policy, say the answer's form in the prompt, or add "
            "a reward between 0 and 1 (--grader.rewards)."
        )
    if all(episode.scored.correct for episode in samples):
        return "Every completion is correct: use harder prompts."
    return (
        "Each prompt is answered either always or never correctly: set algorithm.zero_variance to refill, or use "
        "prompts of medium difficulty."
    )
