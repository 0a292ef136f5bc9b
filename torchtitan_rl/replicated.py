"""Compares what every rank must hold alike: the config at the start; each step's prompts, completions, rewards and advantages.

A rank computes these by itself, from the config, the seed and the step. Ranks that differ would train a mixture of two runs, or
wait for each other forever. Equal checksums cost one all-reduce of a few numbers, at a moment when all ranks have just met.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchtitan_rl import comm
from torchtitan_rl.errors import TrainingStopped, UserError
from torchtitan_rl.types import Episode, Group, Prompt

SHOWN_FIELDS, SHOWN_CHARACTERS = 5, 200
"""Most fields of the config that an error names, and characters of a value."""

COMPARED = ("the prompts", "the completions", "the rewards", "the advantages")
"""Numbers that each call compares. As many in every call, so that ranks in different parts of a step are reported and do not hang."""


def check_replicated(step: int, values: Sequence[Prompt] | Sequence[Group[Episode]]) -> None:
    """Raise TrainingStopped, on every rank, unless all ranks pass the same step and values. Collective."""
    if dist.get_world_size() > 1:
        _check(step, {"the steps": step, **dict.fromkeys(COMPARED, 0), **checksums_of(values)})


def checksums_of(values: Sequence[Prompt] | Sequence[Group[Episode]]) -> dict[str, int]:
    """Checksums of a step's prompts or episodes, by the kind of value. They take about 15 ms for a million tokens."""
    if all(isinstance(value, Prompt) for value in values):
        prompts = ((p.prompt_idx, p.text, p.task, p.expected_answer, p.token_ids) for p in values)
        return {"the prompts": _checksum(prompts)}
    groups = values
    episodes = [(group.prompt.prompt_idx, episode) for group in groups for episode in group.samples]
    written = [
        (i, e.completion.sample_idx, e.completion.policy_version, e.completion) for i, e in episodes
    ]
    credits = [e.credit for _, e in episodes]
    return {
        "the completions": _checksum(
            (*names, c.token_ids, c.loss_mask, c.sampler_logprobs) for *names, c in written
        ),
        "the rewards": _checksum((i, e.reward, e.scored.turn_rewards) for i, e in episodes),
        "the advantages": _checksum(
            (
                *(
                    c.left_out,
                    c.shaped_reward,
                    c.advantage,
                    c.turn_advantages,
                    c.token_advantages,
                    c.columns,
                ),
                *c.token_columns.values(),
            )
            for c in credits
        ),
    }


def _check(step: int, values: Mapping[str, int]) -> None:
    """Raise TrainingStopped, on every rank, unless all ranks pass the same numbers below 2**63. Collective."""
    mine = torch.tensor(list(values.values()))  # [values]
    highest = torch.stack((mine, -mine))  # [2, values]
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    if torch.equal(highest[0], -highest[1]):
        return
    of_ranks = comm.all_gather_lists([dict(values)])
    name = next(name for name in values if len({of_rank[name] for of_rank in of_ranks}) > 1)
    where = " and on ".join(
        ranks for ranks, _ in _by_value([of_rank[name] for of_rank in of_ranks])
    )
    raise TrainingStopped(
        f"step {step}: {name} differ between the ranks: they are not the same on {where}. Every rank must compute the same from "
        "the config, the seed and the step alone. Look for random numbers without the given seed, the time, RANK or files that "
        "are not the same on every node in the task, the environment or the algorithm."
    )


def check_config(fields: Mapping[str, Any]) -> None:
    """Raise UserError, on every rank, unless all ranks have the same config, given as its fields by dotted name. Collective."""
    if dist.get_world_size() == 1:
        return
    checksum = _checksum(sorted((name, repr(value)) for name, value in fields.items()))
    of_ranks = comm.all_gather_lists([checksum])
    if len(set(of_ranks)) == 1:
        return
    texts = comm.all_gather_lists([{name: repr(value) for name, value in fields.items()}])
    names = [
        name
        for name in dict.fromkeys(n for text in texts for n in text)
        if len({t.get(name) for t in texts}) > 1
    ]
    differing = [f"{name} is {_values_by_rank(name, texts)}" for name in names[:SHOWN_FIELDS]]
    more = f"; and {len(names) - SHOWN_FIELDS} fields more" if len(names) > SHOWN_FIELDS else ""
    raise UserError(
        f"config: it differs between the ranks: {'; '.join(differing)}{more}. Start every node with the same command, files and "
        "environment, and let no config function use RANK, the time or random numbers."
    )


def _values_by_rank(name: str, texts: Sequence[Mapping[str, str]]) -> str:
    """Example: "0 on ranks 0, 2, 1 on rank 1"."""
    found = _by_value([text.get(name, "missing") for text in texts])
    return ", ".join(f"{value[:SHOWN_CHARACTERS]} on {ranks}" for ranks, value in found)


def _by_value(values: Sequence[Any]) -> list[tuple[str, Any]]:
    """The ranks that have each value, as text. Example: ["a", "b", "a"] -> [("ranks 0, 2", "a"), ("rank 1", "b")]"""
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return [(f"rank{'s' * (len(r) > 1)} {_some(r)}", value) for value, r in list(ranks.items())[:8]]


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (
        f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    )


def _checksum(rows: Iterable[Sequence[Any]]) -> int:
    """CRC-32 of rows of plain values and arrays, in order."""
    found = 0
    for row in rows:
        for array in (cell for cell in row if isinstance(cell, np.ndarray)):
            found = zlib.crc32(np.ascontiguousarray(array), found)
        found = zlib.crc32(
            repr([cell for cell in row if not isinstance(cell, np.ndarray)]).encode(), found
        )
    return found
