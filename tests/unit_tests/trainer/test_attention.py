import pytest
import torch
import torch.nn.functional as F
from torchtitan.models.common.attention import create_varlen_metadata_for_document

from torchtitan_rl.trainer.attention import PackedSDPA


@pytest.mark.parametrize("lengths", [[5], [3, 7, 1, 4], [1, 1, 1], [9, 2]])
def test_packed_attention_equals_one_causal_attention_a_sequence(lengths):
    torch.manual_seed(0)
    T, heads, kv_heads, width = sum(lengths), 4, 2, 8
    q = torch.randn(1, T, heads, width, requires_grad=True)
    k, v = (torch.randn(1, T, kv_heads, width, requires_grad=True) for _ in range(2))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]  # [1, T]
    attention = PackedSDPA.Config().build()
    found = attention(q, k, v, attention_masks=create_varlen_metadata_for_document(positions), enable_gqa=True)
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
