"""Checks that the lengths of a config fit each other and the model, and finds lengths that do."""

import math
from typing import TYPE_CHECKING

from torchtitan_rl.errors import UserError
from torchtitan_rl.sampling import SamplingConfig

if TYPE_CHECKING:
    from torchtitan_rl.config import RunConfig

PROMPT, MODEL = "prompts.max_prompt_tokens", "generator.max_model_len"
MICROBATCH = "trainer.max_tokens_per_microbatch"


def check_lengths(config: "RunConfig", samplings: dict[str, SamplingConfig]) -> None:
    """Check all lengths at once, those of `samplings` by field. The model's positions count where `model_spec` is known.

    Raises:
        UserError: naming every length that does not fit, and the options of lengths that do.
    """
    positions = math.inf if config.model_spec is None else config.model_spec.model.max_seq_len
    given = {PROMPT: config.prompts.max_prompt_tokens, MODEL: config.generator.max_model_len}
    # The turns of a rollout may be in several traces. Then only a turn must fit.
    turn = config.conversations.max_turn_tokens or math.inf
    given |= {
        f"{field}.max_tokens": min(sampling.max_tokens, turn)
        for field, sampling in samplings.items()
    }
    given[MICROBATCH] = config.trainer.max_tokens_per_microbatch
    fitting = _fitting(given, positions)
    faults = _faults(given, fitting, positions)
    if faults:
        options = [
            f"--{field.replace('_', '-')} {fitting[field]}"
            for field in given
            if given[field] != fitting[field]
        ]
        found = "; ".join(
            f"{field} = {given[field]}: expected {expected}" for field, expected in faults.items()
        )
        raise UserError(f"{found}. Use {' '.join(options)}.")


def _fitting(given: dict[str, int], positions: float) -> dict[str, int]:
    """Returns lengths that fit, close to those given: the model's length is raised, or prompts and completions are cut."""
    completions = {
        field: length for field, length in given.items() if field.endswith(".max_tokens")
    }
    prompt, longest = given[PROMPT], max(completions.values())
    if prompt + longest > positions:
        half = max(1, int(positions) // 2)
        prompt = min(prompt, max(half, int(positions) - longest))
        completions = {
            field: min(length, max(1, int(positions) - prompt))
            for field, length in completions.items()
        }
    needed = prompt + max(completions.values())
    sequence = prompt + completions["sampling.max_tokens"]
    lengths = {
        MODEL: max(needed, int(min(given[MODEL], positions))),
        MICROBATCH: max(sequence, given[MICROBATCH]),
    }
    return {**given, PROMPT: prompt, **completions, **lengths}


def _faults(given: dict[str, int], fitting: dict[str, int], positions: float) -> dict[str, str]:
    """Returns the expected range of each length that does not fit, by field."""
    faults, prompt = {}, given[PROMPT]
    whole, name = min(
        (given[MODEL], f"{MODEL} {given[MODEL]}"), (positions, f"the model's {positions} positions")
    )
    if given[MODEL] > positions:
        faults[MODEL] = f"at most {name}"
    if prompt >= whole:
        faults[PROMPT] = f"less than {name}, which a prompt shares with its completion"
    else:
        faults |= {
            field: f"with {PROMPT} {prompt} at most {name}"
            for field, length in given.items()
            if field.endswith(".max_tokens") and prompt + length > whole
        }
    if given[MICROBATCH] < fitting[MICROBATCH]:
        sequence = f"{PROMPT} + sampling.max_tokens"
        faults[MICROBATCH] = f"at least {fitting[MICROBATCH]}, the longest sequence ({sequence})"
    return faults
