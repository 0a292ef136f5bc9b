"""Rows of sample tables: plain cells, column types over a whole run, and one row for each episode."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchtitan_rl.errors import UserError
from torchtitan_rl.observe.cell_text import utf8
from torchtitan_rl.observe.tokens import TOKENS, TokenPayload, is_demonstration
from torchtitan_rl.text import PLAIN, plain

if TYPE_CHECKING:
    from torchtitan_rl.types import Episode, Group, Prompt

Row = dict[str, Any]

TRAINED_SPLIT = "train"
"""The split that is trained on: only its rows have an advantage."""

_CARRIED = PLAIN | {TokenPayload}
_column = functools.lru_cache(4096)(lambda name: utf8(str(name)))


def plain_row(row: Row) -> Row:
    """A copy of the row with plain cells."""
    return {
        _column(column): cell if type(cell) in _CARRIED else plain(cell)
        for column, cell in row.items()
    }


def has_score(row: Row) -> bool:
    """Whether the row has a "score" or "reward" column to be ranked by."""
    return "score" in row or "reward" in row


def score_of(row: Row) -> float | None:
    """The number that ranks the row: its "score", or its reward without one. None if that is not a number or is NaN."""
    return as_score(row["score"] if "score" in row else row.get("reward"))


def as_score(value: object) -> float | None:
    """The value as a number to rank by; None if it is no number or NaN."""
    return float(value) if isinstance(value, (int, float)) and not math.isnan(value) else None


def kind_of(cell: object) -> str | None:
    """The cell's kind: "truth", "number", "text", "nested", or None for no value. A column should have one kind."""
    if cell is None:
        return None
    if isinstance(cell, bool):
        return "truth"
    if isinstance(cell, (int, float)):
        return "number"
    return "text" if isinstance(cell, str) else "nested"


class Schema:
    """The columns and kinds of every table over a whole run. Calls `warn(topic, message)` once for each change."""

    def __init__(self, warn: Callable[[str, str], None]) -> None:
        self._warn = warn
        self._kinds: dict[str, dict[str, str | None]] = {}

    def fit(self, table: str, rows: list[Row], step: int) -> list[Row]:
        """Returns the rows, with cells as text in columns that have had several kinds up to this step."""
        is_new = table not in self._kinds
        kinds = self._kinds.setdefault(table, {})
        for column, cell in (pair for row in rows for pair in row.items()):
            kind = kind_of(cell)
            if column not in kinds and not is_new:
                change = (
                    f"has a new column {column!r} from step {step} on; it is empty in earlier rows"
                )
                self._warn(f"{table} {column}", f"table {table!r} {change}")
            known = kinds.setdefault(column, kind)
            if known is None:
                kinds[column] = kind
            elif kind not in (None, known) and known != "mixed":
                change = f"column {column!r} held {known}, and {kind} from step {step} on; it is now written as text"
                self._warn(f"{table} {column} mixed", f"table {table!r}: {change}")
                kinds[column] = "mixed"
        mixed = {column for column, kind in kinds.items() if kind == "mixed"}
        if not mixed:
            return rows
        return [
            {c: str(cell) if c in mixed and cell is not None else cell for c, cell in row.items()}
            for row in rows
        ]


def episode_rows(
    groups: "Sequence[Group[Episode]]", *, step: int, split: str, policy_step: int
) -> list[Row]:
    """One row of a sample table for each episode.

    Args:
        step: the controller's step that the rows belong to.
        split: such as "train" or "eval_greedy". Only "train" rows have an advantage.
        policy_step: the step that produced the current weights: `step - 1` during the step, `step` after its update.
            A row's staleness is `policy_step` minus the step that produced the weights of its first token.

    Raises UserError if a loss has given an episode a column of a name that the tables have.
    """
    return [
        _row(
            group.prompt,
            episode,
            len(group.samples),
            rank,
            step=step,
            split=split,
            policy_step=policy_step,
        )
        | masses
        for group in groups
        for episode, rank, masses in zip(
            group.samples, _ranks(group.samples), _masses(group.samples), strict=True
        )
    ]


def update_masses(episodes: "Sequence[Episode]") -> list[float]:
    """Each episode's share of its group's update: a listwise loss's mass, else max(A_i, 0) / sum. 0 where no A_i is above 0."""
    pushes = [
        e.credit.columns.get("mass", max(e.credit.advantage, 0.0) if e.in_loss else 0.0)
        for e in episodes
    ]
    return [push / (math.fsum(pushes) or 1.0) for push in pushes]


def _masses(episodes: "Sequence[Episode]") -> list[Row]:
    """Each episode's q_mass, MaxEnt's own or exp(r_i) / sum, and update_mass_proxy; nothing in a group without rewards."""
    rewards = np.array(
        [e.credit.shaped_reward for e in episodes], dtype=float
    )  # [G] NaN without one
    if np.isnan(rewards).all():
        return [{} for _ in episodes]
    powers = np.nan_to_num(np.exp(rewards - np.nanmax(rewards)))  # [G]
    masses = zip(episodes, (powers / powers.sum()).tolist(), update_masses(episodes), strict=True)
    return [
        {"q_mass": e.credit.columns.get("q_mass", q), "update_mass_proxy": update}
        for e, q, update in masses
    ]


def _ranks(episodes: "Sequence[Episode]") -> Iterator[int | None]:
    """Each episode's rank in its group by reward: 0 is the best; None if it has no reward."""
    rewards = [
        -math.inf if e.reward is None or math.isnan(e.reward) else e.reward for e in episodes
    ]
    order = sorted(
        range(len(episodes)), key=lambda i: (-rewards[i], episodes[i].completion.sample_idx)
    )
    rank_of = {place: rank for rank, place in enumerate(order)}
    return (
        None if e.reward is None or math.isnan(e.reward) else rank_of[i]
        for i, e in enumerate(episodes)
    )


def _conversation(episode: "Episode") -> list[dict[str, Any]]:
    """The messages after the prompt. The policy's messages carry their turn's reward, advantage and logged columns.

    If there are several traces, each message has the index of its own. An answer belongs to the trace of the next turn.
    """
    said: list[dict[str, Any]] = []
    turns = episode.completion.turns
    has_traces = len(episode.completion.traces) > 1
    for i, (turn, advantage) in enumerate(
        zip(turns, episode.credit.turn_advantages or [None] * len(turns), strict=True)
    ):
        answered = turns[min(i + 1, len(turns) - 1)]
        facts = {"reward": turn.reward, "advantage": advantage, "logged": turn.columns or None}
        facts |= {"trace": turn.trace} if has_traces else {}
        given = {name: fact for name, fact in facts.items() if fact is not None}
        place = {"trace": answered.trace} if has_traces else {}
        said += [
            {"role": "assistant", "content": turn.text, **given},
            *({**message, **place} for message in turn.messages),
        ]
    return said


def _traces(episode: "Episode") -> list[dict[str, Any]]:
    """The rollout's traces: where each comes from, its context and its tokens."""
    completion = episode.completion
    return [
        {
            "parent": trace.parent,
            "reason": trace.reason,
            "context": list(trace.messages),
            "context_tokens": trace.context_tokens,
            "tokens": span.stop - span.start,
        }
        for trace, span in zip(completion.traces, completion.spans, strict=True)
    ]


def _row(
    prompt: "Prompt",
    episode: "Episode",
    group_size: int,
    rank: int | None,
    *,
    step: int,
    split: str,
    policy_step: int,
) -> Row:
    scored, completion = episode.scored, episode.completion
    trained = split == TRAINED_SPLIT
    num_sampled = (
        completion.num_sampled
    )  # the log-probabilities of other tokens are 0: their sum needs no mask
    has_logprobs = num_sampled > 0 and not is_demonstration(episode, trained)
    row = {
        "step": step,
        "episode_id": f"{split}/{step}/{prompt.prompt_idx}/{completion.sample_idx}",
        "policy_version": completion.policy_version,
        "staleness": policy_step - completion.oldest_version,
        "split": split,
        "prompt_idx": prompt.prompt_idx,
        "sample_idx": completion.sample_idx,
        "group_size": group_size,
        "rank_in_group": rank,
        "select_reason": "",
        "prompt": prompt.text,
        "response": completion.text,
        "expected_answer": prompt.expected_answer,
        "answer": scored.answer,
        "correct": scored.correct,
        "reward": scored.reward,
        "score": scored.reward,
        "advantage": episode.credit.advantage if trained else None,
        "in_loss": trained and episode.in_loss,
        "left_out": episode.credit.left_out,
        "prompt_tokens": len(prompt.token_ids),
        "response_tokens": num_sampled,
        "carried_tokens": num_sampled - int(np.count_nonzero(completion.fresh_mask)),
        "finish_reason": completion.finish_reason,
        "logprob_mean": float(np.add.reduce(completion.sampler_logprobs)) / num_sampled
        if has_logprobs
        else None,
        "logprob_diff_mean": episode.logprob_diff and episode.logprob_diff.mean,
        "logprob_diff_max": episode.logprob_diff and episode.logprob_diff.max,
    }
    if episode.reference_logprobs is not None and num_sampled:
        row["reference_logprob_mean"] = float(
            episode.reference_logprobs[completion.loss_mask].mean()
        )
    if observed := len(completion.token_ids) - num_sampled:
        row["observed_tokens"] = observed
    if prompt.task:
        row["task"] = prompt.task
    if prompt.messages is not None:
        row["messages"] = prompt.messages
    if completion.turns:
        row["turns"] = len(completion.turns)
        row["environment_seconds"] = sum(turn.environment_seconds for turn in completion.turns)
        row["conversation"] = _conversation(episode)
    if len(completion.traces) > 1:
        row["traces"] = _traces(episode)
    for kind, cells in (
        ("reward", scored.reward_breakdown),
        ("extra", scored.extra),
        ("example", prompt.columns),
    ):
        row.update({f"{kind}/{name}": cell for name, cell in cells.items()})
    own = episode.credit.columns
    if taken := sorted(row.keys() & own):
        raise UserError(
            f"algorithm.loss: the sample tables have columns named {taken} already. Give its columns other names."
        )
    return row | own | {TOKENS: TokenPayload(episode, trained)}
