"""Compares what every rank must hold alike: the config at the start; each step's prompts, completions, rewards and advantages.

A rank computes these by itself, from the config, the seed and the step. Ranks that differ would train a mixture of two runs, or
wait for each other forever. A step's values are compared by their checksums, at a moment when all ranks have just met.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from torchtitan_rl import comm
from torchtitan_rl.errors import TrainingStopped, UserError
from torchtitan_rl.text import head_and_tail
from torchtitan_rl.types import Episode, Group, Prompt

SHOWN_CHARACTERS, SHOWN_VALUES = 200, 8
"""Most characters that an error has of a value or of the ranks with it, and most values."""


def check_replicated(step: int, values: Sequence[Prompt] | Sequence[Group[Episode]]) -> None:
    """Raise TrainingStopped, on every rank, unless all ranks pass the same step and values. Collective."""
    if dist.get_world_size() == 1:
        return
    # Ranks in different parts of a step have different names here: they are reported and do not hang.
    for name, ranks in _differing({"the steps": step, **checksums_of(values)}).items():
        where = " and on ".join(ranks.values())
        raise TrainingStopped(
            f"step {step}: {name} differ between the ranks: they are not the same on {where}. Every rank must compute the same "
            "from the config, the seed and the step alone. Look for random numbers without the given seed, the time, RANK or "
            "files that are not the same on every node in the task, the environment or the algorithm."
        )


def checksums_of(values: Sequence[Prompt] | Sequence[Group[Episode]]) -> dict[str, int]:
    """Checksums of a step's prompts or episodes, by the kind of value. They take about 15 ms for a million tokens."""
    if all(isinstance(value, Prompt) for value in values):
        prompts = ((p.prompt_idx, p.text, p.task, p.expected_answer, p.token_ids) for p in values)
        return {"the prompts": _checksum(prompts)}
    written: list[tuple[Any, ...]] = []
    rewards: list[tuple[Any, ...]] = []
    credits: list[tuple[Any, ...]] = []
    for group in values:
        index = group.prompt.prompt_idx
        for episode in group.samples:
            c, credit = episode.completion, episode.credit
            names = (index, c.sample_idx, c.policy_version)
            own_prompt = None if c.prompt is None else c.prompt.token_ids
            written.append((*names, own_prompt, c.token_ids, c.loss_mask, c.sampler_logprobs))
            rewards.append((index, episode.reward, episode.scored.turn_rewards))
            plain = (credit.left_out, credit.shaped_reward, credit.advantage, credit.columns)
            arrays = (
                credit.turn_advantages,
                credit.token_advantages,
                *credit.token_columns.values(),
            )
            credits.append((*plain, *arrays))
    named = {"the completions": written, "the rewards": rewards, "the advantages": credits}
    return {name: _checksum(rows) for name, rows in named.items()}


def check_config(fields: Mapping[str, Any]) -> None:
    """Raise UserError, on every rank, unless all ranks have the same config, given as its fields by dotted name. Collective."""
    differing: list[str] = []
    for name, ranks in _differing({name: repr(value) for name, value in fields.items()}).items():
        each = [f"{value[:SHOWN_CHARACTERS]} on {where}" for value, where in ranks.items()]
        differing.append(f"{name} is {', '.join(each)}")
    if differing:
        shown = head_and_tail("; ".join(differing), 10 * SHOWN_CHARACTERS)
        raise UserError(
            f"config: it differs between the ranks: {shown}. Start every node with the same command, files and environment, and let "
            "no config function use RANK, the time or random numbers."
        )


def _differing(mine: Mapping[str, Any]) -> dict[str, dict[Any, str]]:
    """Returns what is not the same on all ranks: by name each value with its ranks, in words. Collective.

    Example: {"seed": {"0": "ranks 0, 2", "1": "rank 1"}}
    """
    by_rank = comm.all_gather_lists([mine])
    differing: dict[str, dict[Any, str]] = {}
    for name in dict.fromkeys(name for values in by_rank for name in values):
        ranks: dict[Any, list[int]] = {}
        for rank, values in enumerate(by_rank):
            ranks.setdefault(values.get(name, "missing"), []).append(rank)
        if len(ranks) == 1:
            continue
        differing[name] = {}
        for value, members in list(ranks.items())[:SHOWN_VALUES]:
            shown = head_and_tail(", ".join(map(str, members)), SHOWN_CHARACTERS)
            differing[name][value] = f"{'ranks' if len(members) > 1 else 'rank'} {shown}"
    return differing


def _checksum(rows: Iterable[Sequence[Any]]) -> int:
    """CRC-32 of rows of plain values and arrays, in order."""
    checksum = 0
    for row in rows:
        for array in (cell for cell in row if isinstance(cell, np.ndarray)):
            checksum = zlib.crc32(np.ascontiguousarray(array), checksum)
        plain = [cell for cell in row if not isinstance(cell, np.ndarray)]
        checksum = zlib.crc32(repr(plain).encode(), checksum)
    return checksum
