"""Rows of sample tables: plain cells, and one row for each episode."""

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

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
    return {
        _column(column): cell if type(cell) in _CARRIED else plain(cell)
        for column, cell in row.items()
    }


def score_of(row: Row) -> float | None:
    """The number that ranks the row: its "score", or its reward without one. None if that is not a number or is NaN."""
    return as_score(row["score"] if "score" in row else row.get("reward"))


def as_score(value: object) -> float | None:
    """The value as a number to rank by; None if it is no number or NaN."""
    return float(value) if isinstance(value, (int, float)) and not math.isnan(value) else None


def messages_of(row: Row) -> list[dict[str, Any]]:
    """The sample as messages: a prompt that is no chat is a user's message, a response in one turn an assistant's."""
    asked, answered = row.get("messages"), row.get("conversation")
    if not asked and "prompt" in row:
        asked = str(row["prompt"]).rstrip()
    if not answered and "response" in row:
        answered = str(row["response"])
    return [*_as_messages("user", asked), *_as_messages("assistant", answered)]


def _as_messages(role: str, cell: Any) -> list[dict[str, Any]]:
    """The messages of a cell. What is none is the content of one: a user's own table may have any cell under this name."""
    items = cell if isinstance(cell, list) else [] if cell is None else [cell]
    return [item if isinstance(item, dict) else {"role": role, "content": item} for item in items]


def episode_rows(groups: "Sequence[Group[Episode]]", *, step: int, split: str) -> list[Row]:
    """One row of a sample table for each episode. Only rows of the split "train" have an advantage."""
    return [
        _row(group, episode, step, split) | mass
        for group in groups
        for episode, mass in zip(group.samples, _masses(group.samples), strict=True)
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
    rewards = np.array([e.credit.shaped_reward for e in episodes], float)  # [G] NaN without one
    if np.isnan(rewards).all():
        return [{} for _ in episodes]
    powers = np.nan_to_num(np.exp(rewards - np.nanmax(rewards)))  # [G]
    masses = zip(episodes, (powers / powers.sum()).tolist(), update_masses(episodes), strict=True)
    return [
        {"q_mass": e.credit.columns.get("q_mass", q), "update_mass_proxy": update}
        for e, q, update in masses
    ]


def _conversation(episode: "Episode") -> list[dict[str, Any]]:
    """The messages after the prompt. The policy's messages carry their turn's reward, advantage and logged columns.

    If there are several traces, each message has the index of its own. An answer belongs to the trace of the next turn.
    """
    messages: list[dict[str, Any]] = []
    turns = episode.completion.turns
    has_traces = len(episode.completion.traces) > 1
    advantages = episode.credit.turn_advantages or [None] * len(turns)
    for i, (turn, advantage) in enumerate(zip(turns, advantages, strict=True)):
        message = {"role": "assistant", "content": turn.text}
        facts = {"reward": turn.reward, "advantage": advantage, "logged": turn.columns or None}
        message |= {name: fact for name, fact in facts.items() if fact is not None}
        answers = [dict(answer) for answer in turn.messages]
        if has_traces:
            message["trace"] = turn.trace
            next_trace = turns[min(i + 1, len(turns) - 1)].trace
            answers = [{**answer, "trace": next_trace} for answer in answers]
        messages += [message, *answers]
    return messages


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


def _row(group: "Group[Episode]", episode: "Episode", step: int, split: str) -> Row:
    scored, completion = episode.scored, episode.completion
    prompt = completion.prompt or group.prompt
    trained = split == TRAINED_SPLIT
    policy_step = step - 1 if trained else step  # an evaluation comes after the step's update
    num_sampled = completion.num_sampled
    logprob_mean = None
    if num_sampled and not is_demonstration(episode, trained):
        # The log-probabilities of tokens that nobody sampled are 0: the sum needs no mask.
        logprob_mean = float(np.add.reduce(completion.sampler_logprobs)) / num_sampled
    row = {
        "step": step,
        "episode_id": f"{split}/{step}/{prompt.prompt_idx}/{completion.sample_idx}",
        "policy_version": completion.policy_version,
        "staleness": policy_step - completion.oldest_version,
        "split": split,
        "prompt_idx": prompt.prompt_idx,
        "sample_idx": completion.sample_idx,
        "group_size": len(group.samples),
        "select_reason": "",
        "prompt": prompt.text,
        "response": completion.text,
        "expected_answer": prompt.expected_answer,
        "answer": scored.answer,
        "correct": scored.correct,
        "reward": scored.reward,
        "advantage": episode.credit.advantage if trained else None,
        "in_loss": trained and episode.in_loss,
        "left_out": episode.credit.left_out,
        "prompt_tokens": len(prompt.token_ids),
        "response_tokens": num_sampled,
        "carried_tokens": num_sampled - int(np.count_nonzero(completion.fresh_mask)),
        "finish_reason": completion.finish_reason,
        "logprob_mean": logprob_mean,
        "logprob_diff_mean": episode.logprob_diff and episode.logprob_diff.mean,
        "logprob_diff_max": episode.logprob_diff and episode.logprob_diff.max,
    }
    row |= _optional_columns(prompt, episode)
    of_loss = {name: cell for name, cell in episode.credit.columns.items() if name not in row}
    return row | of_loss | {TOKENS: TokenPayload(episode, trained)}


def _optional_columns(prompt: "Prompt", episode: "Episode") -> Row:
    """The columns that only some episodes have: of a reference, conversations, tasks, and what functions logged."""
    scored, completion = episode.scored, episode.completion
    num_sampled = completion.num_sampled
    row: Row = {}
    if episode.reference_logprobs is not None and num_sampled:
        sampled = episode.reference_logprobs[completion.loss_mask]  # [num_sampled]
        row["reference_logprob_mean"] = float(sampled.mean())
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
    columns = {"reward": scored.reward_breakdown, "extra": scored.extra, "example": prompt.columns}
    for kind, cells in columns.items():
        row |= {f"{kind}/{name}": cell for name, cell in cells.items()}
    return row
