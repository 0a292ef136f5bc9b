"""Compares what trainer and engine compute for one sequence with the rounding noise of the same model at that moment.

Two right implementations differ by rounding. How much that moves a log-probability depends on the model, its training and
the sequence: on SmolLM2-135M in bfloat16 by up to 0.7, in float32 by 5e-5. So the limit is measured and not set: the policy
scores the sequence again while each layer's output is off by a random rounding error, and the differences that this makes are
the scale.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from torchtitan_rl.trainer.gate import logit_scale
from torchtitan_rl.types import FloatArray

DRAWS = 4
"""Forwards with random rounding errors."""

LARGEST_RATIOS = {torch.float32: (30.0, 30.0), torch.bfloat16: (3.0, 1.5)}
"""Multiples of the noise over which both of the `distances` must be, by the coarser dtype. docs/measured/weight_sync.md has the figures."""

LEAST_NOISE = {torch.float32: 3e-6, torch.bfloat16: torch.finfo(torch.bfloat16).eps / 2}
"""In a small model that is certain of its text the sums inside the engine's products round more than the layers' outputs, which are
what is drawn. In float32 it is less than the noise of SmolLM2-135M."""


def disagreement(
    engine: FloatArray, trainer: FloatArray, noise: FloatArray, dtype: torch.dtype
) -> str:
    """Returns by how much two models differ if it is too much, else "".

    Args:
        engine, trainer: [L - 1] the log-probabilities of the probed tokens.
        noise: [2] `rounding_noise` of the trainer.
        dtype: the coarser one of trainer and engine.
    """
    ratios, limits = distances(engine, trainer, dtype) / noise, LARGEST_RATIOS[dtype]  # [2]
    if not (ratios <= limits).any():
        return f"{ratios[0]:.3g} times as much as rounding explains ({noise[0]:.2g}); the limit is {limits[0]:g} times"
    return ""


def rounding_noise(
    model: nn.Module,
    logprobs: Callable[[], FloatArray],
    exact: FloatArray,
    dtype: torch.dtype,
) -> FloatArray:
    """Returns how far random rounding errors move the log-probabilities of a sequence, [2]: root mean squares of `distances`.
    Collective.

    Args:
        logprobs: computes the model's log-probabilities of the probed tokens, [L - 1].
        exact: them without these errors, [L - 1].
        dtype: the coarser one of trainer and engine, whose rounding errors are drawn.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices), rounding_errors(model, torch.finfo(dtype).eps):
        torch.manual_seed(0)  # the same on every rank
        moved = [distances(logprobs(), exact, dtype) for _ in range(DRAWS)]  # [DRAWS, 2]
    return np.maximum(root_mean_square(np.array(moved)), LEAST_NOISE[dtype])


@contextmanager
def rounding_errors(model: nn.Module, eps: float) -> Iterator[None]:
    """Within the context, multiply each element of the output of each layer and of the final norm by a random number from
    1 - eps / 2 to 1 + eps / 2.

    So are the outputs of `model.rounded`, if it has them: a recurrent state carries the errors of its inputs on, and in bfloat16
    the layers' outputs alone explain a fourth of the difference.
    """

    def off(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        error = (torch.rand_like(output, dtype=torch.float32) - 0.5) * eps
        return (output * (1 + error)).to(output.dtype)

    modules = [*model.layers.children(), model.norm, *getattr(model, "rounded", ())]
    hooks = [module.register_forward_hook(off) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def distances(one: FloatArray, other: FloatArray, dtype: torch.dtype) -> FloatArray:
    """Returns the root mean squares of the differences of two models' log-probabilities [L - 1], in two scales, [2].

    First each in the other's `logit_scale`, so that each token weighs the same: otherwise the few tokens of which a trained policy is
    not certain are the whole sum, and four draws of them are no standard for a fifth. Then each in the larger of both scales: a token
    of which only the other is certain, as one in a text that repeats may be, is no sum of its own there. A wrong model is far in both.
    """
    name = str(dtype).removeprefix("torch.")
    scale = logit_scale(other, name)  # [L - 1]
    either = np.maximum(scale, logit_scale(one, name))  # [L - 1]
    return root_mean_square(np.stack([(one - other) / scale, (one - other) / either], axis=-1))


def root_mean_square(values: FloatArray) -> FloatArray:
    """Returns sqrt(mean(values^2)) over the first axis; NaN where a value is NaN."""
    return np.sqrt(np.mean(np.square(values, dtype=np.float64), axis=0))
