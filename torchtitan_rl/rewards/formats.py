"""Rewards for the format of a completion: 1 if it matches, else 0."""

import json
import re
from collections.abc import Callable, Sequence

from torchtitan_rl.data.answers import BOX, last_boxed
from torchtitan_rl.data.task import completion_text
from torchtitan_rl.data.tool_calls import without_thinking
from torchtitan_rl.fields.typed_arguments import typed


def boxed(completions, **_):
    """1 for exactly one non-empty \\boxed{...} or \\fbox{...} after the thinking, where there is some."""

    def has(text: str) -> bool:
        is_one = len(BOX.findall(without_thinking(text))) == 1
        return is_one and bool((last_boxed(text) or "").strip())

    return [float(has(completion_text(completion))) for completion in completions]


@typed
def tags(names: Sequence[str]) -> Callable:
    """1 for exactly these tags in this order, with no text outside them.

    Example: tags(["think", "answer"]) requires <think>...</think> <answer>...</answer>. A first <think> may be missing,
    because chat templates open it.
    """
    if not names or not all(re.fullmatch(r"[\w.:-]+", name) for name in names):
        raise ValueError(f"tags takes names such as 'think', without brackets, not {names!r}")
    blocks = (rf"<{name}>(?:(?!</?{name}>).)*</{name}>" for name in map(re.escape, names))
    whole = re.compile(r"\s*".join(blocks), re.DOTALL)
    opened = "<think>" if names[0] == "think" else ""  # at the end of the prompt
    begins = ("", opened)
    return _matching("tags", lambda text: any(whole.fullmatch(b + text.strip()) for b in begins))


@typed
def json_object(keys: Sequence[str] = ()) -> Callable:
    """1 if the completion, or its only fenced code block, is a JSON object with at least these keys."""

    def holds(text: str) -> bool:
        fenced = re.findall(r"```(?:json)?[^\S\n]*\n(.*?)```", text, re.DOTALL)
        try:
            value = json.loads(fenced[0] if len(fenced) == 1 else text)
        except (ValueError, RecursionError):
            return False
        return isinstance(value, dict) and set(keys) <= value.keys()

    return _matching("json_object", holds)


@typed
def regex(pattern: str, *, whole: bool = False) -> Callable:
    """1 if the completion contains the pattern, or with `whole` matches it entirely. A dot also matches line breaks."""
    compiled = re.compile(pattern, re.DOTALL)
    match = compiled.fullmatch if whole else compiled.search
    return _matching("regex", lambda text: match(text) is not None)


def _matching(name: str, holds: Callable[[str], bool]) -> Callable:
    def reward(completions, **_):
        return [float(holds(completion_text(completion))) for completion in completions]

    reward.__name__ = name
    return reward
