"""A reward in TRL's signature that differs within every group of an even number, so that all completions are learnt from."""

import os
from zlib import crc32

ALIKE = float(os.environ.get("MADE_UP_ALIKE", "0"))
"""Share of the prompts whose completions all get 0, as where a model is always wrong."""


def made_up(prompts, completions, **_):
    """0, 1, 0, 1, ..."""
    return [float(place % 2 and _differs(prompt)) for place, prompt in enumerate(prompts)]


def _differs(prompt):
    """By the prompt's digits, which are the same in a text and in messages."""
    return crc32("".join(filter(str.isdigit, str(prompt))).encode()) % 1000 >= ALIKE * 1000
