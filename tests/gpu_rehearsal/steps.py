"""Scored completions of random tokens and lengths, the same on every rank."""

from collections.abc import Sequence

import numpy as np

from torchtitan_rl.types import Completion, Group, Prompt, ScoredCompletion


def scored_group(
    rng: np.random.Generator,
    number: int,
    *,
    prompt: tuple[int, int],
    lengths: tuple[int, int],
    rewards: Sequence[float],
    recorded: int = 0,
) -> Group[ScoredCompletion]:
    """A completion for each reward. Prompt and completions have a number of tokens in the ranges of `prompt` and `lengths`.

    Args:
        recorded: experts that the engine records of each token.
    """
    ids = rng.integers(5, 100, int(rng.integers(*prompt)))
    samples = []
    for place, reward in enumerate(rewards):
        length = int(rng.integers(*lengths))
        completion = Completion(
            sample_idx=place, policy_version=0, token_ids=rng.integers(5, 100, length), text="", finish_reason="stop",
            sampler_logprobs=-np.ones(length, dtype=np.float32),
            sampler_records=np.zeros((len(ids) + length, recorded), np.uint8) if recorded else None,
        )  # fmt: skip
        samples.append(ScoredCompletion(completion=completion, reward=reward))
    return Group(prompt=Prompt(prompt_idx=number, text="", token_ids=ids, expected_answer=""), samples=samples)
