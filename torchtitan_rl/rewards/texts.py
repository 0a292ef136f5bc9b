"""Rewards for the length, repetitiveness and script of a completion."""

import re
import unicodedata
from collections.abc import Callable

from torchtitan_rl.data.task import completion_text
from torchtitan_rl.fields.typed_arguments import check_above_zero, typed


@typed
def length(target: int) -> Callable:
    """0 for exactly `target` tokens, falling linearly to -1 at 0 tokens and at 2 `target` tokens or more."""
    check_above_zero(target=target)

    def length(completion_ids, **_):
        return [-min(abs(len(ids) - target) / target, 1.0) for ids in completion_ids]

    return length


@typed
def repetition(ngram: int = 4) -> Callable:
    """Minus the fraction of token n-grams that already occurred earlier in the completion; 0 if it is too short."""
    check_above_zero(ngram=ngram)

    def repetition(completion_ids, **_):
        places = ((ids, range(len(ids) - ngram + 1)) for ids in completion_ids)
        grams = [[tuple(ids[i : i + ngram]) for i in begins] for ids, begins in places]
        return [len(set(each)) / len(each) - 1.0 if each else 0.0 for each in grams]

    return repetition


@typed
def script(name: str) -> Callable:
    """The fraction of a completion's letters in one script, such as latin, cyrillic, cjk, hangul, arabic or greek.

    It cannot distinguish languages that share a script, such as English and German. None for a completion without
    letters.
    """
    beginning = name.upper()
    names = (unicodedata.name(chr(point), "") for point in range(0x10000))
    if not any(each.startswith(f"{beginning} ") for each in names):
        raise ValueError(f"{name!r} is no script: no letter's name in Unicode begins with it")

    def script(completions, **_):
        scores = []
        for completion in completions:
            text = re.sub("</?think>", "", completion_text(completion))
            letters = [character for character in text if character.isalpha()]
            own = sum(unicodedata.name(letter, "").startswith(beginning) for letter in letters)
            scores.append(own / len(letters) if letters else None)
        return scores

    return script
