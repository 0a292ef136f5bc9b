"""Per-token values of samples. Every row carries a reference to them; they are written only for rows that are shown."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torchtitan_rl.algorithm.losses.loss import TEACHER_TOKEN
from torchtitan_rl.trainer.packing import token_advantages

if TYPE_CHECKING:
    from torchtitan_rl.types import BoolArray, Episode, FloatArray

Decode = Callable[[Sequence[int]], str]
"""Converts token ids to text, including special tokens."""

TOKENS = "tokens"
"""Name of the column."""
MOST_TOKENS = 8192
"""Longer completions are stored without per-token values; their text is stored in full."""
_LONGEST_CHARACTER = 8
"""Largest number of tokens that may encode one character together."""


class TokenPayload:
    """The per-token values of one episode, computed only when written: every row has a payload, and few are written."""

    __slots__ = ("episode", "trained")

    def __init__(self, episode: "Episode", trained: bool) -> None:
        self.episode = episode
        self.trained = trained

    def __repr__(self) -> str:
        """Without an address, so that rows with equal cells are equal as text."""
        return "TokenPayload"

    def written(self, decode: Decode) -> dict[str, Any] | None:
        """The values in the form the store keeps; None for more than `MOST_TOKENS` tokens.

        Example: {"text": ["4", "+", "\\n"], "logprob": [-0.1, -0.02, None], "diff": [1e-7, 0, None], "advantage": 0.7}
        Tokens written by an environment have None. An advantage shared by all sampled tokens is one number.
        """
        episode, completion = self.episode, self.episode.completion
        if len(completion.token_ids) > MOST_TOKENS:
            return None
        mask, credit = completion.loss_mask, episode.credit  # [L]
        tokens: dict[str, Any] = {"text": pieces(completion.token_ids.tolist(), decode)}
        if not is_demonstration(episode, self.trained):
            tokens["logprob"] = _spread(completion.sampled_logprobs, mask, 3)
        if completion.token_versions is not None:
            ages = completion.policy_version - completion.token_versions  # [L] in updates
            tokens["age"] = ages.tolist()
        differences = episode.logprob_diff.tokens if episode.logprob_diff else {}
        for name, values in differences.items():  # [num_sampled] each
            if len(values) == completion.num_sampled:
                tokens[name] = _spread(values, mask, 2 if name == "diff" else 3)
        for name, values in credit.token_columns.items():  # [L] each
            if name == TEACHER_TOKEN:
                tokens[name] = [decode([int(t)]) if own else None for t, own in zip(values, mask)]
            else:
                tokens[name] = _spread(values[mask], mask, 3)
        if self.trained and episode.in_loss:
            tokens["advantage"] = float(f"{credit.advantage:.4g}")
            if credit.turn_advantages is not None or credit.token_advantages is not None:
                tokens["advantage"] = _spread(token_advantages(episode)[mask], mask, 4)
        return tokens


def with_special_tokens(row: dict[str, Any], decode: Decode | None) -> dict[str, Any]:
    """The row of a completion in one turn with the special tokens inside its response, which the texts of rewards leave out.

    Example: "4<|im_start|>user" in place of "4user". A special token at its end stays left out.
    """
    payload = row.get(TOKENS)
    if decode is None or not isinstance(payload, TokenPayload):
        return row
    completion = payload.episode.completion
    is_sampled = not is_demonstration(payload.episode, payload.trained)
    if not is_sampled or completion.turns or "response" not in row:
        return row
    whole = decode(completion.token_ids.tolist())
    ended = whole == completion.text + decode(completion.token_ids[-1:].tolist())
    return row if ended else {**row, "response": whole}


def is_demonstration(episode: "Episode", trained: bool) -> bool:
    """Whether the completion comes from the data: nobody sampled it, so that its log-probabilities are 0 and nothing was compared."""
    compared = episode.logprob_diff is not None
    return trained and not compared and not episode.completion.sampler_logprobs.any()


def with_written_tokens(row: dict[str, Any], decode: Decode | None) -> dict[str, Any]:
    """The row with its tokens as plain values, or without tokens if there are none to store."""
    payload = row.get(TOKENS)
    if not isinstance(payload, TokenPayload):
        return row
    tokens = payload.written(decode) if decode else None
    rest = without_tokens(row)
    return rest if tokens is None else {**rest, TOKENS: tokens}


def without_tokens(row: dict[str, Any]) -> dict[str, Any]:
    """The row without its tokens, which only the store keeps, and only for shown rows."""
    return {column: cell for column, cell in row.items() if column != TOKENS}


def _spread(sampled: "FloatArray", mask: "BoolArray", digits: int) -> list[float | None]:
    """Spreads values of the sampled tokens [num_sampled] over all tokens [L], with None for the others."""
    values = iter(sampled.tolist())
    return [float(f"{next(values):.{digits}g}") if mine else None for mine in mask.tolist()]


def pieces(ids: list[int], decode: Decode) -> list[str]:
    """The text that each token adds. The last token of a multi-token character gets the whole character."""
    texts: list[str] = []
    first: list[int] = []  # the tokens of the first character
    start = 0  # their text's length
    waiting: list[int] = []
    for place, token in enumerate(ids, start=1):
        waiting.append(token)
        # After the first ones, as some tokenizers leave out the space with which a text begins.
        text = decode(first + waiting)[start:]
        unfinished = text.endswith("\ufffd") and len(waiting) < _LONGEST_CHARACTER
        if unfinished and place < len(ids):
            texts.append("")
            continue
        texts.append(text)
        if not first:
            first, start = waiting, len(text)
        waiting = []
    return texts
