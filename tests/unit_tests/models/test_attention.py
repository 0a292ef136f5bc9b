import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import _registry

from tests.gpu_rehearsal import cpu_kernels  # noqa: F401  (registers kernels)
from torchtitan_rl.models.attention import (
    FlashVarlen,
    FlexPacked,
    PackedRows,
    PackedSDPA,
    attention_config,
    similar_lengths,
)
from torchtitan_rl.types import SegmentLayout


@pytest.mark.parametrize("lengths", [[5], [3, 7, 1, 4], [1, 1, 1], [9, 2], [2, 40, 3, 21, 20, 1, 7]])
def test_packed_attention_equals_causal_attention_of_each_sequence(lengths):
    torch.manual_seed(0)
    T, heads, kv_heads, width = sum(lengths), 4, 2, 8
    q = torch.randn(1, T, heads, width, requires_grad=True)
    k, v = (torch.randn(1, T, kv_heads, width, requires_grad=True) for _ in range(2))
    attention = PackedSDPA.Config().build()
    found = attention(q, k, v, attention_masks=PackedRows.of(SegmentLayout.of(lengths, device="cpu")), enable_gqa=True)
    rows, begin = [], 0
    for n in lengths:
        part = [t[:, begin : begin + n].transpose(1, 2) for t in (q, k, v)]
        rows.append(F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True).transpose(1, 2))
        begin += n
    expected = torch.cat(rows, 1)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    grads = [torch.autograd.grad((out * weights).sum(), (q, k, v), retain_graph=True) for out in (found, expected)]
    torch.testing.assert_close(*grads)


def test_batches_hold_sequences_of_similar_lengths():
    assert similar_lengths([20, 17, 16, 13, 3], [False] * 5) == [[0, 1], [2, 3], [4]]
    assert similar_lengths([7, 8, 7], [True, False, True]) == [[1], [0, 2]]


@pytest.mark.parametrize("window", [(-1, 0), (2, 0)])
def test_sequence_with_a_shared_prefix_attends_as_if_it_had_its_own_copy(window):
    torch.manual_seed(0)
    layout = SegmentLayout.of([5, 2, 4, 1, 3, 1], {1: (0, 2), 2: (0, 2), 3: (0, 2), 5: (4, 1)}, device="cpu")
    assert layout.positions.tolist() == [0, 1, 2, 3, 4, 2, 3, 2, 3, 4, 5, 2, 0, 1, 2, 1]
    # Each sequence with all of its tokens, and the places there of the pack's.
    whole = [0, 1, 2, 3, 4, 0, 1, 5, 6, 0, 1, 7, 8, 9, 10, 0, 1, 11, 12, 13, 14, 12, 15]
    own = [0, 1, 2, 3, 4, 7, 8, 11, 12, 13, 14, 17, 18, 19, 20, 22]
    lengths = [5, 4, 6, 3, 3, 2]
    qkv = [torch.randn(1, 16, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    attention = PackedSDPA.Config(window_size=window).build()
    masks = PackedRows.of(layout)
    # At least half of the 4, 3 and 2 tokens are shared.
    assert [batch.num_queries for batch in masks.batches] == [6, 3, 2, 1, 1]
    found = attention(*qkv, attention_masks=masks, enable_gqa=True)
    rows = PackedRows.of(SegmentLayout.of(lengths, device="cpu"))
    expected = attention(*(t[:, whole] for t in qkv), attention_masks=rows, enable_gqa=True)[:, own]
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    grads = [torch.autograd.grad((out * weights).sum(), qkv) for out in (found, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_flex_attention_to_shared_prompts_equals_sdpa(eager_flex, scale):
    torch.manual_seed(0)
    # Three groups, a later trace of the first, a single sequence, padding.
    own, shared = [30, 4, 17, 20, 5, 6, 40, 9, 3], {1: (0, 25), 2: (0, 10), 4: (3, 19), 5: (0, 28)}
    layout = SegmentLayout.of(own, shared, device="cpu", padding=12)
    qkv = [torch.randn(1, sum(own), heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    weights = torch.randn(1, sum(own), 4, 16)
    results = []
    for config in (FlexPacked.Config(), PackedSDPA.Config()):
        out = config.build()(*qkv, attention_masks=config.masks(layout), scale=scale, enable_gqa=True)
        results.append([out, *torch.autograd.grad((out * weights).sum(), qkv)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=4e-6)


def test_flex_attention_leaves_out_the_blocks_of_siblings():
    layout = SegmentLayout.of([256, 128, 128, 128], {1: (0, 128), 2: (0, 128)}, device="cpu")
    blocks = FlexPacked.Config().masks(layout).to_dense()[0, 0]
    assert blocks.tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 0, 1, 0], [0, 0, 0, 0, 1]]


@pytest.fixture
def gpu(monkeypatch):
    """A stand-in for a GPU of the compute capability that it is called with, as far as constructors look."""

    def simulate(capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)

    return simulate


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_torchs_own_flash_attention_is_used_on_every_gpu(gpu, capability):
    gpu(capability)
    built = attention_config(float32=False).build()
    assert isinstance(built, FlashVarlen)
    assert built.window_size == (-1, 0)
    assert _registry.current_flash_attention_impl() is None


@pytest.mark.parametrize("window", [(-1, 0), (2, 0)])
def test_flash_attention_equals_sdpa_inside_each_sequence(gpu, window):
    gpu((8, 0))
    config = FlashVarlen.Config(window_size=window)
    layout = SegmentLayout.of([5, 2, 3], device="cpu")
    torch.manual_seed(0)
    qkv = [torch.randn(1, 10, heads, 8) for heads in (4, 2, 2)]
    found = config.build()(*qkv, attention_masks=config.masks(layout), scale=0.3, enable_gqa=True)
    sdpa = PackedSDPA.Config(window_size=window).build()
    rounded = (t.bfloat16().float() for t in qkv)
    expected = sdpa(*rounded, attention_masks=PackedRows.of(layout), scale=0.3, enable_gqa=True)
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)
