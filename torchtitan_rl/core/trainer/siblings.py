"""Keeps completions of one prompt in one micro-batch, where they compute the prompt once."""

from collections.abc import Iterator, Sequence

from torchtitan_rl.core.trainer.packing import count_work
from torchtitan_rl.core.types import Member


def ways_to_join(
    items: Sequence[list[Member]], *, max_tokens: int, join_siblings_from: int
) -> Iterator[list[list[Member]]]:
    """Yields the items as they are, then with at most 2, 4, 8, ... siblings in one, as long as that joins more of them.

    Whole groups save the most tokens, and small items are easier to divide evenly over ranks.

    Args:
        items: those of one prompt are neighbours.
        max_tokens: the most tokens of a joined item. Shared ones count once.
        join_siblings_from: the tokens from which on a prompt's completions are joined. 0: never.
    """
    yield [*items]
    size, before = 2, len(items)
    while join_siblings_from:
        joined = _joined(items, size, max_tokens, join_siblings_from)
        if len(joined) == before:
            return
        yield joined
        size, before = 2 * size, len(joined)


def _joined(
    items: Sequence[list[Member]], size: int, max_tokens: int, join_siblings_from: int
) -> list[list[Member]]:
    """Returns the items with up to `size` siblings in one."""
    joined: list[list[Member]] = [[]]
    for item in items:
        both = joined[-1] + item
        prompts = {member.prompt.prompt_idx for member in both}
        is_long = len(item[0].prompt.token_ids) >= join_siblings_from
        fits = count_work(both, share_prompts_from=join_siblings_from)[0] <= max_tokens
        if len(prompts) == 1 and is_long and len(both) <= size and fits:
            joined[-1] = both
        else:
            joined.append(item)
    return [item for item in joined if item]
