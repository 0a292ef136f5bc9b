"""Per-token numbers of samples: carried beside a row's cells until it is known to be shown, and written for those only."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_rl.core.types import BoolArray, Episode, FloatArray

Decode = Callable[[Sequence[int]], str]
"""Token ids as text, special tokens included."""

TOKENS = "tokens"
"""The column's name."""
MOST_TOKENS = 8192
"""Of a longer completion no token is written: its text says enough."""
_LONGEST_CHARACTER = 8
"""Tokens that one character may be spread over."""


class TokenPayload:
    """What is known of every token of one episode. It refers to the episode: one is made for every row, and few are written."""

    __slots__ = ("episode", "trained")

    def __init__(self, episode: "Episode", trained: bool) -> None:
        self.episode = episode
        self.trained = trained

    def __repr__(self) -> str:  # no address in it: rows are the same where their other cells are
        return "TokenPayload"

    def written(self, decode: Decode) -> dict[str, Any] | None:
        """As the store keeps it; None for more than `MOST_TOKENS`.

        Example: {"text": ["4", "+", "\\n"], "logprob": [-0.1, -0.02, None], "diff": [1e-07, 0.0, None], "advantage": 0.7};
        None where an environment wrote the token; an advantage that all sampled tokens share is one number.
        """
        episode, completion = self.episode, self.episode.completion
        if len(completion.token_ids) > MOST_TOKENS:
            return None
        mask = completion.loss_mask  # [L]
        found: dict[str, Any] = {
            "text": _pieces(completion.token_ids.tolist(), decode),
            "logprob": _spread(completion.sampled_logprobs, mask, 3),
        }
        signed = episode.logprob_diff and episode.logprob_diff.signed  # [num_sampled]
        if signed is not None and len(signed) == completion.num_sampled:
            found["diff"] = _spread(signed, mask, 2)
        if self.trained and episode.in_loss:
            of_turns = episode.credit.turn_advantages is not None
            found["advantage"] = (
                _spread(episode.token_advantages[mask], mask, 4)
                if of_turns
                else float(f"{episode.credit.advantage:.4g}")
            )
        return found


def _spread(sampled: "FloatArray", mask: "BoolArray", digits: int) -> list[float | None]:
    """Values of the sampled tokens, [num_sampled], as one for every token, [L]."""
    values = iter(sampled.tolist())
    return [float(f"{next(values):.{digits}g}") if mine else None for mine in mask.tolist()]


def _pieces(ids: list[int], decode: Decode) -> list[str]:
    """The text that each token adds; of a character that is spread over several, the last one has it all."""
    found: list[str] = []
    waiting: list[int] = []
    for token in ids:
        waiting.append(token)
        text = decode(waiting)
        if text.endswith("\ufffd") and len(waiting) < _LONGEST_CHARACTER and len(found) + 1 < len(ids):
            found.append("")
            continue
        found.append(text)
        waiting = []
    return found
