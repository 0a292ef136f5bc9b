"""The samples of a step that fails: they are written for people to read, and are in no metric."""

import math
from collections.abc import Sequence

from torchtitan_rl.observe.sample_rows import TRAINED_SPLIT, Row, episode_rows
from torchtitan_rl.observe.tokens import MOST_TOKENS, TOKENS, Decode, with_special_tokens
from torchtitan_rl.types import Completion, Credit, Episode, Group, Sample, ScoredCompletion

REASON = "its step failed"
"""Why these samples are not in the loss, unless the algorithm has left them out already."""
WRITTEN_TOKENS = 20_000
"""Tokens take the most time to write: about 0.1 s for these."""


class UnfinishedStep:
    """The newest state of the groups of a step that is not whole yet: sampled, then graded, then with credit."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, int], Group] = {}
        self._step = 0

    def keep(self, groups: Sequence[Group[Sample]], *, step: int, split: str) -> None:
        """Keep the groups instead of what is kept of the same prompts."""
        self._step = step
        self._groups.update({(split, group.prompt.prompt_idx): group for group in groups})

    def forget(self, split: str) -> None:
        """The split's samples are recorded like those of every step."""
        self._groups = {key: group for key, group in self._groups.items() if key[0] != split}

    def rows(self, decode: Decode | None) -> list[Row]:
        """A row for each kept sample, with the name of its table.

        Up to `WRITTEN_TOKENS` tokens are with them, first of samples on whose log-probabilities trainer and sampler differ most.
        """
        rows = []
        for (split, _), group in sorted(self._groups.items(), key=lambda pair: pair[0]):
            trained = split == TRAINED_SPLIT
            members = episode_rows([_drafted(group)], step=self._step, split=split)
            for row, sample in zip(members, group.samples, strict=True):
                credited = trained and isinstance(sample, Episode)
                row |= {
                    "table": "rollout/samples" if trained else "evaluation/samples",
                    "advantage": row["advantage"] if credited else None,
                    "in_loss": False,
                    "left_out": row["left_out"] or REASON,
                }
            rows += [with_special_tokens(row, decode) for row in members]
        left = WRITTEN_TOKENS
        for row in sorted(rows, key=_difference, reverse=True):
            if row["response_tokens"] > min(left, MOST_TOKENS):
                del row[TOKENS]
            else:
                left -= row["response_tokens"]
        return rows


def _drafted(group: Group) -> Group[Episode]:
    """The group with an episode for each sample, whatever it has already: not in the loss as long as the algorithm has not seen it."""
    episodes = []
    for sample in group.samples:
        if isinstance(sample, Completion):
            sample = ScoredCompletion(completion=sample, reward=None)
        if isinstance(sample, ScoredCompletion):
            sample = Episode(scored=sample, credit=Credit(left_out=REASON))
        episodes.append(sample)
    return Group(prompt=group.prompt, samples=episodes)


def _difference(row: Row) -> float:
    """The largest difference of a sample's log-probabilities, 0 if it is not known; NaN counts as the largest of all."""
    most = row["logprob_diff_max"] or 0.0
    return math.inf if math.isnan(most) else most
