"""Prompts, completions and their groups: a group is the completions of one `prompt_idx`."""

import dataclasses
from collections.abc import Sequence
from itertools import groupby

from torchtitan_rl.types import Completion, Prompt, ScoredCompletion


def renumbered(prompts: Sequence[Prompt], *, first: int) -> list[Prompt]:
    """The prompts with prompt_idx first, first + 1, ...: fresh ones that join a step's earlier ones."""
    return [dataclasses.replace(prompt, prompt_idx=first + i) for i, prompt in enumerate(prompts)]


def completion_groups(completions: Sequence[Completion]) -> list[list[Completion]]:
    """The completions of each prompt; neighbours of one prompt must stand together, as the generator returns them."""
    return [list(group) for _, group in groupby(completions, key=lambda c: c.prompt_idx)]


def scored_groups(scored: Sequence[ScoredCompletion]) -> list[list[ScoredCompletion]]:
    """The scored completions of each prompt, from a list sorted by prompt."""
    return [list(group) for _, group in groupby(scored, key=lambda s: s.completion.prompt_idx)]
