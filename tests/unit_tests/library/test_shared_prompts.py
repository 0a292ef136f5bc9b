"""A GPU's attention over shared prompts equals its attention over sequences with prompts of their own.

CPU kernels stand in for FlashAttention's (tests/gpu_rehearsal/cpu_kernels.py), behind the same calls and in wider types.
"""

import random

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from tests.gpu_rehearsal import cpu_kernels  # noqa: F401  (registers kernels)
from torchtitan_rl.core.types import SegmentLayout
from torchtitan_rl.library.shared_prompts import SharedKeys, shared_prompt_attention

PACKS = {
    "one completion": ([9], [0]),
    "two groups": ([7, 3, 1, 6, 2], [0, 4, 4, 0, 5]),
    "later traces and padding": ([6, 2, 4, 5, 3, 1, 8], [0, 3, 3, 0, 0, 2, 0]),
    "a prompt longer than all completions": ([31, 1, 1, 2, 1], [0, 29, 29, 29, 29]),
}
"""Own tokens of each segment, and those that it shares with its root."""


def random_pack(n: int) -> tuple[list[int], list[int]]:
    """Three groups of n completions."""
    rng = random.Random(n)
    own: list[int] = []
    shared: list[int] = []
    for _ in range(3):
        prompt = rng.randint(1, 12)
        own += [prompt + rng.randint(0, 9), *(rng.randint(1, 9) for _ in range(n - 1))]
        shared += [0, *[prompt] * (n - 1)]
    return own, shared


for number in range(1, 9):
    PACKS[f"{number} completions of each"] = random_pack(number)


def with_copies(own: list[int], shared: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Returns the token of the pack at each place of whole sequences, the places of the pack's tokens, and lengths."""
    whole: list[int] = []
    places: list[int] = []
    begin = root = 0
    for num_own, num_shared in zip(own, shared, strict=True):
        root = root if num_shared else begin
        whole += range(root, root + num_shared)
        places += range(len(whole), len(whole) + num_own)
        whole += range(begin, begin + num_own)
        begin += num_own
    return whole, places, [a + b for a, b in zip(own, shared, strict=True)]


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).detach().abs().max() / expected.detach().abs().max())


@pytest.mark.parametrize("window", [-1, 4])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("pack", PACKS)
def test_output_and_gradients_equal_those_of_sequences_with_their_own_prompts(pack, dtype, bound, window):
    torch.manual_seed(0)
    own, shared = PACKS[pack]
    qkv = [torch.randn(sum(own), heads, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]
    options = {"scale": 0.4, "window_size": (window, 0), "enable_gqa": True, "num_splits": 1}
    keys = SharedKeys.of(SegmentLayout.of(own, shared, device="cpu"))
    found = shared_prompt_attention(*qkv, keys, **options)
    whole, places, lengths = with_copies(own, shared)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    expected = varlen_attn(*(t[whole] for t in qkv), ends, ends, max(lengths), max(lengths), **options)[places]
    weights = torch.randn_like(found)
    grads = [torch.autograd.grad((out * weights).sum(), qkv) for out in (found, expected)]
    for one, other in zip((found, *grads[0]), (expected, *grads[1]), strict=True):
        assert difference(one, other) <= bound
    # Tensor parallelism: a rank has a part of the heads.
    halves = [shared_prompt_attention(*(t.chunk(2, 1)[i] for t in qkv), keys, **options) for i in range(2)]
    assert difference(torch.cat(halves, 1), found) <= bound


def test_maps_of_the_documented_example():
    keys = SharedKeys.of(SegmentLayout.of([4, 2], [0, 1], device="cpu"))
    assert keys.source.tolist() == [0, 1, 2, 3, 0, 4, 5]
    assert keys.query_ends.tolist() == [0, 4, 6]
    assert keys.key_ends.tolist() == [0, 4, 7]
    assert keys.longest == 4
