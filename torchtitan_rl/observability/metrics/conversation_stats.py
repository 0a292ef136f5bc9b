"""Metrics of a step's conversations: turns, tools, environments. Equal on every rank; empty without conversations."""

import math
from collections.abc import Sequence
from statistics import fmean

from torchtitan_rl.common.summary import describe, same_everywhere
from torchtitan_rl.core.types import Completion, Episode, Group, Metric, flat


def conversation_metrics(groups: Sequence[Group[Episode]]) -> dict[str, Metric]:
    """`conversations/...` over the completions that used an environment."""
    completions = [episode.completion for episode in flat(groups)]
    conversations = [c for c in completions if c.turns or c.error is not None]
    if not conversations:
        return {}
    sampled = sum(c.num_sampled for c in conversations)
    tokens = sum(len(c.token_ids) for c in conversations)
    seconds = [turn.environment_seconds for c in conversations for turn in c.turns]
    columns = sorted({name for c in conversations for turn in c.turns for name in turn.columns})
    logged = {name: [total for c in conversations if (total := _total(c, name)) is not None] for name in columns}
    return {
        **describe("conversations/turns", [len(c.turns) for c in conversations], ("mean", "min", "max")),
        **describe("conversations/traces", [len(c.traces) for c in conversations], ("mean", "max")),
        **describe("conversations/environment_seconds", seconds, ("mean", "max")),
        **{f"conversations/{name}": same_everywhere(fmean(totals)) for name, totals in logged.items() if totals},
        "conversations/count": same_everywhere(float(len(conversations))),
        "conversations/env_errors": same_everywhere(float(sum(c.error is not None for c in conversations))),
        "conversations/tokens_of_contexts": same_everywhere(
            sum(trace.context_tokens for c in conversations for trace in c.traces) / len(conversations)
        ),
        "conversations/tokens_sampled": same_everywhere(sampled / len(conversations)),
        "conversations/tokens_observed": same_everywhere((tokens - sampled) / len(conversations)),
    }


def _total(completion: Completion, column: str) -> float | None:
    """The sum of a logged number over a conversation; None if it was never a finite number."""
    cells = [turn.columns.get(column) for turn in completion.turns]
    numbers = [float(cell) for cell in cells if isinstance(cell, (bool, int, float)) and math.isfinite(cell)]
    return sum(numbers) if numbers else None
