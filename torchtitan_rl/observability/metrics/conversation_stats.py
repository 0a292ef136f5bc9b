"""Metrics of a step's conversations: turns, tools, environments. Equal on every rank; empty without conversations."""

import math
from collections.abc import Sequence
from statistics import fmean

from torchtitan_rl.common.summary import describe, same_everywhere
from torchtitan_rl.core.types import Completion, Episode, Group, Metric, flat


def conversation_metrics(groups: Sequence[Group[Episode]]) -> dict[str, Metric]:
    """`conversations/...` over the completions that used an environment."""
    completions = [episode.completion for episode in flat(groups)]
    conversations = [one for one in completions if one.turns or one.error is not None]
    if not conversations:
        return {}
    sampled = sum(one.num_sampled for one in conversations)
    tokens = sum(len(one.token_ids) for one in conversations)
    seconds = [turn.environment_seconds for one in conversations for turn in one.turns]
    columns = sorted({name for one in conversations for turn in one.turns for name in turn.columns})
    logged = {name: [total for one in conversations if (total := _total(one, name)) is not None] for name in columns}
    return {
        **describe("conversations/turns", [len(one.turns) for one in conversations], ("mean", "min", "max")),
        **describe("conversations/traces", [len(one.traces) for one in conversations], ("mean", "max")),
        **describe("conversations/environment_seconds", seconds, ("mean", "max")),
        **{f"conversations/{name}": same_everywhere(fmean(totals)) for name, totals in logged.items() if totals},
        "conversations/count": same_everywhere(float(len(conversations))),
        "conversations/env_errors": same_everywhere(float(sum(one.error is not None for one in conversations))),
        "conversations/tokens_of_contexts": same_everywhere(
            sum(trace.context_tokens for one in conversations for trace in one.traces) / len(conversations)
        ),
        "conversations/tokens_sampled": same_everywhere(sampled / len(conversations)),
        "conversations/tokens_observed": same_everywhere((tokens - sampled) / len(conversations)),
    }


def _total(completion: Completion, column: str) -> float | None:
    """The sum of a logged number over a conversation; None if it was never a finite number."""
    cells = [turn.columns.get(column) for turn in completion.turns]
    numbers = [float(cell) for cell in cells if isinstance(cell, (bool, int, float)) and math.isfinite(cell)]
    return sum(numbers) if numbers else None
