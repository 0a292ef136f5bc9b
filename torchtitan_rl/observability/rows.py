"""Rows of sample tables: plain cells, and the columns of an episode."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchtitan_rl.observability.text import utf8

if TYPE_CHECKING:
    from torchtitan_rl.types import Episode

Row = dict[str, Any]

MISSING = object()
"""A row without a score, as opposed to a score of None."""

EPISODE_COLUMNS = [
    "step",
    "policy_version",
    "staleness",
    "split",
    "prompt_idx",
    "sample_idx",
    "group_size",
    "rank_in_group",
    "select_reason",
    "prompt",
    "response",
    "expected_answer",
    "answer",
    "reward",
    "score",
    "advantage",
    "weight",
    "in_loss",
    "prompt_tokens",
    "response_tokens",
    "finish_reason",
    "logprob_mean",
    "logprob_diff_mean",
    "logprob_diff_max",
    "messages",
]
"""The columns every episode row may have; then come reward/<function> and extra/<name>."""

_PLAIN = (str, bool, float, type(None))


def plain(cell: Any) -> Any:
    """The cell as something every sink can hold: None, bool, int of 64 bits, float, str, or lists and dicts of them.

    Tensors and arrays become numbers or lists; anything else becomes its text. Never raises.
    """
    if type(cell) in _PLAIN:
        return cell
    if isinstance(cell, int):
        return int(cell) if -(2**63) <= cell < 2**63 else str(cell)
    try:
        if isinstance(cell, str):
            return str.__str__(cell)
        if isinstance(cell, dict):
            return {str(key): plain(value) for key, value in cell.items()}
        if isinstance(cell, (list, tuple)):
            return [plain(value) for value in cell]
        if hasattr(cell, "tolist"):
            return plain(cell.tolist())
        return str(cell)
    except Exception as error:
        return f"<{type(cell).__name__} that cannot be shown: {type(error).__name__}>"


def plain_row(row: Row) -> Row:
    """A copy of the row with plain cells. What `Episode.to_dict` returns becomes the columns of an episode row."""
    if "reward_breakdown" in row and "response" in row:
        row = _episode_columns(dict(row))
    return {utf8(str(column)): cell if type(cell) in _PLAIN else plain(cell) for column, cell in row.items()}


def score_of(row: Row) -> Any:
    """What the row is ranked by: a finite or infinite float, None for NaN, None and text, MISSING without a score.

    A row without the column "score" is ranked by its reward, if it has one.
    """
    score = row["score"] if "score" in row else row.get("reward", MISSING)
    if score is MISSING:
        return MISSING
    if not isinstance(score, (int, float)) or math.isnan(score):
        return None
    return float(score)


def episode_row(
    episode: "Episode", *, step: int, split: str, trainer_version: int | None = None, rank_in_group: int | None = None
) -> Row:
    """The episode as one row of a sample table.

    Args:
        step: the training step it belongs to.
        split: such as "train", "eval_greedy".
        trainer_version: optimizer steps behind the weights being trained; staleness is its distance to the version
            that sampled the episode. None: the same weights, staleness 0.
        rank_in_group: 0 for the best of its group; `episode_rows` fills it in.
    """
    fields = {name: getattr(episode, name) for name in episode.__slots__}
    row = _episode_columns(fields)
    row["step"], row["split"], row["rank_in_group"] = step, split, rank_in_group
    row["staleness"] = 0 if trainer_version is None else trainer_version - episode.policy_version
    return row


def episode_rows(
    episodes: "Sequence[Episode]", *, step: int, split: str, trainer_version: int | None = None
) -> list[Row]:
    """`episode_row` of each, ranked in its group by reward: 0 is the best; None where there is no reward."""
    groups: dict[int, list[tuple[float, int, int]]] = {}
    for place, episode in enumerate(episodes):
        if episode.reward is not None and not math.isnan(episode.reward):
            groups.setdefault(episode.prompt_idx, []).append((-episode.reward, episode.sample_idx, place))
    ranks: dict[int, int] = {}
    for members in groups.values():
        ranks.update({place: rank for rank, (_, _, place) in enumerate(sorted(members))})
    return [
        episode_row(episode, step=step, split=split, trainer_version=trainer_version, rank_in_group=ranks.get(place))
        for place, episode in enumerate(episodes)
    ]


def _episode_columns(fields: dict[str, Any]) -> Row:
    """An episode's fields as columns, in EPISODE_COLUMNS' order; fields that were excluded give no column."""
    tokens = fields.get("token_ids")
    logprobs = fields.get("sampler_logprobs")
    fields["score"] = fields.get("reward")
    if tokens is not None:
        fields["response_tokens"] = len(tokens)
    if fields.get("prompt_token_ids") is not None:
        fields["prompt_tokens"] = len(fields["prompt_token_ids"])
    if logprobs is not None:
        fields["logprob_mean"] = sum(logprobs) / len(logprobs) if len(logprobs) else None
    row = {}
    for column in EPISODE_COLUMNS:
        if column in fields:
            row[column] = fields[column]
        elif column in ("step", "staleness", "split", "rank_in_group"):
            row[column] = None
    if row.get("messages") is None:
        row.pop("messages", None)
    for function, reward in (fields.get("reward_breakdown") or {}).items():
        row[f"reward/{function}"] = reward
    for name, cell in (fields.get("extra") or {}).items():
        row[f"extra/{name}"] = cell
    return row
