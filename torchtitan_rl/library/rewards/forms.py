"""Whether a completion has the form that was asked for: 1 or 0."""

import json
import re
from collections.abc import Callable, Sequence

from torchtitan_rl.library.answers import last_boxed
from torchtitan_rl.library.task import completion_text


def boxed(completions, **_):
    """Exactly one \\boxed{...}, with something in it."""

    def has(text: str) -> bool:
        return text.count("\\boxed{") == 1 and bool((last_boxed(text) or "").strip())

    return [float(has(completion_text(completion))) for completion in completions]


def tags(names: Sequence[str]) -> Callable:
    """The completion is these tags one after another, each once and with nothing outside of them.

    Example: tags(["think", "answer"]) asks for <think>...</think> <answer>...</answer>.
    """
    whole = re.compile(r"\s*".join(rf"<{name}>(?:(?!</?{name}>).)*</{name}>" for name in names), re.DOTALL)
    return _matching("tags", lambda text: whole.fullmatch(text.strip()) is not None)


def json_object(keys: Sequence[str] = ()) -> Callable:
    """The completion, or its only fenced block, is a JSON object with at least these keys."""

    def holds(text: str) -> bool:
        fenced = re.findall(r"```(?:json)?\s*\n(.*?)```", text, re.DOTALL)
        try:
            found = json.loads(fenced[0] if len(fenced) == 1 else text)
        except (ValueError, RecursionError):
            return False
        return isinstance(found, dict) and set(keys) <= found.keys()

    return _matching("json_object", holds)


def regex(pattern: str, *, whole: bool = False) -> Callable:
    """The pattern is found in the completion, or with `whole` is all of it; a dot matches line breaks too."""
    compiled = re.compile(pattern, re.DOTALL)
    match = compiled.fullmatch if whole else compiled.search
    return _matching("regex", lambda text: match(text) is not None)


def _matching(name: str, holds: Callable[[str], bool]) -> Callable:
    def reward(completions, **_):
        return [float(holds(completion_text(completion))) for completion in completions]

    reward.__name__ = name
    return reward
