"""The probe's rule: differences are compared with the noise of rounding."""

import numpy as np
import pytest
import torch

from torchtitan_rl.sync.probe import DRAWS, LARGEST_RATIOS, disagreement, distances, rounding_noise


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 30), (torch.bfloat16, 3)])
def test_difference_is_compared_with_the_noise_of_rounding(dtype, limit):
    trainer, noise = np.full(4, -40.0), np.full(2, 0.2)  # [L - 1] so improbable that bfloat16's unit, 1 - p, is 1
    assert disagreement(trainer + 0.9 * limit * 0.2, trainer, noise, dtype) == ""
    difference = disagreement(trainer + 1.1 * limit * 0.2, trainer, noise, dtype)
    assert difference.endswith(f"times as much as rounding explains (0.2); the limit is {limit} times")
    assert disagreement(np.array([0.1, np.nan]), np.zeros(2), noise, dtype).startswith("nan times")


def test_noise_is_that_of_the_draws_relative_to_how_certain_each_token_is():
    certain, improbable = np.log(1 - 1e-2), -40.0
    exact = np.array([certain, improbable])  # [L - 1]
    off = np.array([0.05 * (1e-2 + 1e-4), 0.05])  # [L - 1]
    draws = iter([exact + off, exact - off, exact + off, exact - off])
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleDict(), "norm": torch.nn.Identity()})
    noise = rounding_noise(model, lambda: next(draws), exact, torch.bfloat16)
    assert noise == pytest.approx([0.05, 0.0494], rel=1e-3)
    assert rounding_noise(model, lambda: exact, exact, torch.float32) == pytest.approx([3e-6] * 2)
    plain = distances(exact + off, exact, torch.float32)
    assert plain == pytest.approx([0.05 / 2**0.5] * 2, rel=1e-3)


def test_token_of_which_only_the_trainer_is_certain_stops_no_push_alone():
    """As Gemma 3 in bfloat16, on text that repeats: from 0.99999 to 0.97 in one of 551 tokens."""
    trainer = np.full(551, np.log(0.9))  # [L - 1]
    trainer[0] = np.log(1 - 1e-5)
    engine, noise = trainer + 0.005, np.full(2, 0.05)
    engine[0] = np.log(0.97)
    first, second = distances(engine, trainer, torch.bfloat16) / noise
    assert first > LARGEST_RATIOS[torch.bfloat16][0]
    assert second < 1.4
    assert disagreement(engine, trainer, noise, torch.bfloat16) == ""
    assert disagreement(engine + 0.02, trainer, noise, torch.bfloat16)


@pytest.mark.parametrize("engine_noise", [0.7, 1.4])
@pytest.mark.parametrize("uncertain", [0.01, 0.1, 0.5])
def test_no_right_push_in_a_million_is_stopped_where_few_tokens_are_uncertain(uncertain, engine_noise):
    """Noise grows with 1 - p, and its size differs from token to token. A normal tail fitted to the simulated ratios is under 1e-6."""
    draw = np.random.default_rng(0)
    ratios = []
    for _ in range(4000):
        is_uncertain = draw.random(127) < uncertain  # [L - 1]
        one_minus_p = np.where(is_uncertain, draw.uniform(0.1, 1, 127), 10 ** draw.uniform(-6, -2, 127))
        trainer = np.log1p(-one_minus_p)
        noise = 0.05 * one_minus_p * draw.lognormal(0, 0.5, 127)
        moved = [distances(trainer + noise * draw.normal(size=127), trainer, torch.bfloat16)[0] for _ in range(DRAWS)]
        engine = trainer + engine_noise * noise * draw.normal(size=127)
        ratios.append(distances(engine, trainer, torch.bfloat16)[0] / np.sqrt(np.mean(np.square(moved))))
    log_ratios = np.log(ratios)  # [pushes]
    assert log_ratios.mean() + 5 * log_ratios.std() < np.log(LARGEST_RATIOS[torch.bfloat16][0])
