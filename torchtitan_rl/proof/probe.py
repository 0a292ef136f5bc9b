"""Compares what trainer and engine compute for one sequence with the rounding noise of the same model at that moment.

Two right implementations differ by rounding. How much that moves a log-probability depends on the model, its training and
the sequence: on SmolLM2-135M in bfloat16 by up to 0.7, in float32 by 5e-5. So the limit is measured and not set: the policy
scores the sequence again while each layer's output is off by a random rounding error, and the differences that this makes are
the scale.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torchtitan_rl.core.types import FloatArray, IntArray

DRAWS = 4
"""Forwards with random rounding errors."""

LARGEST_RATIO = {torch.float32: 30.0, torch.bfloat16: 3.0}
"""Largest allowed difference, as a multiple of the noise, by the coarser dtype. docs/weight_sync.md has the measurements."""

LARGEST_SLOPE, DRAWN_SLOPES = 7.0, 3.0
"""In bfloat16, the largest allowed slope of the differences over the log-probabilities: this many of its standard errors if the noise
were independent, and of the slopes that the drawn errors have, if more. Another scale of the logits is below the noise of each token,
and shows over all of them; so does noise that is alike wherever the probe repeats a prompt. In float32 that scale is above the noise,
and kernels that approximate tilt all tokens by 2e-6."""


class Noise(NamedTuple):
    """What rounding errors do to the log-probabilities of a sequence."""

    size: float
    """Root mean square by which they move them."""
    tilt: float = 0.0
    """Root mean square of the slopes of their differences over the log-probabilities."""


def rounding_noise(
    model: nn.Module, logprobs: Callable[[IntArray], FloatArray], probe: IntArray, dtype: torch.dtype
) -> Noise:
    """Returns what random rounding errors do to the log-probabilities of probe[1:]. Collective.

    Args:
        logprobs: computes the model's log-probabilities of probe[1:], [L - 1].
        dtype: the coarser one of trainer and engine, whose rounding errors are drawn.
    """
    exact = logprobs(probe)  # [L - 1]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices), rounding_errors(model, torch.finfo(dtype).eps):
        torch.manual_seed(0)  # the same on every rank
        moved = [logprobs(probe) - exact for _ in range(DRAWS)]  # [L - 1] each
    size = max(root_mean_square(np.stack(moved)), torch.finfo(dtype).eps / 2)
    return Noise(size, root_mean_square(np.array([slope(draw, exact, size)[0] for draw in moved])))


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


def slope(difference: FloatArray, logprobs: FloatArray, noise: float) -> tuple[float, float]:
    """Returns the least-squares slope of `difference` [L - 1] over `logprobs` [L - 1], and in standard errors of independent noise.

    With logits a times as large it is about a - 1.
    """
    centered = logprobs - logprobs.mean(dtype=np.float64)  # [L - 1]
    spread = max(float(np.square(centered).sum()), 1e-12)
    found = float((difference * centered).sum() / spread)
    return found, found / noise * spread**0.5


def root_mean_square(values: FloatArray) -> float:
    """Returns sqrt(mean(values^2)); NaN if any value is NaN."""
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
