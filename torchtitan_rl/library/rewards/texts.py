"""How long, how repetitive and in which script a completion is."""

import unicodedata
from collections.abc import Callable

from torchtitan_rl.library.task import completion_text


def length(target: int) -> Callable:
    """0 for exactly `target` tokens, falling evenly on both sides to -1 for none and for twice as many or more."""

    def length(completion_ids, **_):
        return [-min(abs(len(ids) - target) / target, 1.0) for ids in completion_ids]

    return length


def overlong(max_tokens: int, cache: int) -> Callable:
    """0 up to max_tokens - cache tokens, then falling evenly to -1 at max_tokens: DAPO's soft punishment, arXiv 2503.14476 (13)."""

    def overlong(completion_ids, **_):
        return [-min(max(len(ids) - (max_tokens - cache), 0) / cache, 1.0) for ids in completion_ids]

    return overlong


def repetition(ngram: int = 4) -> Callable:
    """Minus the share of a completion's n-grams of tokens that came before in it; 0 where it is too short to have two."""

    def repetition(completion_ids, **_):
        grams = [[tuple(ids[i : i + ngram]) for i in range(len(ids) - ngram + 1)] for ids in completion_ids]
        return [len(set(each)) / len(each) - 1.0 if each else 0.0 for each in grams]

    return repetition


def script(name: str) -> Callable:
    """The share of a completion's letters that are of one script, such as latin, cyrillic, cjk, hangul, arabic or greek.

    A language that has a script for itself is known by it; English and German are not told apart. None without letters.
    """
    beginning = name.upper()

    def script(completions, **_):
        scores = []
        for completion in completions:
            letters = [character for character in completion_text(completion) if character.isalpha()]
            own = sum(unicodedata.name(letter, "").startswith(beginning) for letter in letters)
            scores.append(own / len(letters) if letters else None)
        return scores

    return script
