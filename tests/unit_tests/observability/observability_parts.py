"""Parts the room's tests share: an episode, the worst of model outputs, and forked processes."""

import multiprocessing

from torchtitan_rl.types import Episode

FORK = multiprocessing.get_context("fork")
"""Processes that need no second import of torch."""

NASTY = (
    "[/answer] list[int] [bold]x[/] \x1b[31mred\x1b[0m \x1b]8;;http://x\x07link\x1b]8;;\x07 \x9b2J "
    "<script>alert(1)</script> </table> | a | `b` 👩‍💻🇩🇪 \x00 \ud800 \u202etxt.exe\r\n"
) + "x" * 100_000
"""A model's answer: rich markup, ANSI escapes, HTML, table bars, emoji, NUL, a lone surrogate, 100k characters."""


def episode(prompt_idx=0, sample_idx=0, reward=1.0, **fields):
    """An episode with three tokens and log-probabilities of -0.5."""
    tokens = fields.pop("token_ids", [5, 6, 7])
    values = {
        "policy_version": 3,
        "prompt": f"What is {prompt_idx} + 1?",
        "response": f"[ANSWER] {prompt_idx + 1}",
        "expected_answer": str(prompt_idx + 1),
        "answer": str(prompt_idx + 1),
        "prompt_token_ids": [1, 2],
        "sampler_logprobs": [-0.5] * len(tokens),
        "finish_reason": "stop",
        "reward_breakdown": {"correct": reward},
        "extra": {},
        "group_size": 4,
    }
    return Episode(
        prompt_idx=prompt_idx, sample_idx=sample_idx, reward=reward, token_ids=tokens, **{**values, **fields}
    )
