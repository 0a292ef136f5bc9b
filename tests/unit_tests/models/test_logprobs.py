import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist

from torchtitan_rl.models import logprobs
from torchtitan_rl.models.logprobs import chunked_logprobs

T, D, V = 13, 8, 37


def inputs(seed: int = 0):
    torch.manual_seed(seed)
    hidden = torch.randn(T, D, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, D, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(0, V, (T,))


def dense(hidden, weight, labels, temperature, keeps=None):
    """log p(label) and entropy by the definitions, with the whole [T, V] in memory. keeps: [T, V] bool."""
    keeps = torch.ones(len(hidden), len(weight), dtype=torch.bool) if keeps is None else keeps
    logp = (hidden @ weight.T / temperature).masked_fill(~keeps, -torch.inf).log_softmax(-1)  # [T, V]
    logp = logp.masked_fill(~keeps, 0)  # in the entropy 0 log 0 is 0
    return logp.gather(-1, labels[:, None])[:, 0], -(logp.exp() * logp * keeps).sum(-1)


def kept_at_random(labels):
    """(bool [T, V], packed as `chunked_logprobs` reads it): a few words for each token, the label among them."""
    keeps = torch.rand(T, V, generator=torch.Generator().manual_seed(1)) < 0.2
    keeps[torch.arange(T), labels] = True
    return keeps, torch.from_numpy(np.packbits(keeps.numpy(), axis=1, bitorder="little"))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 5, T, 100])
@pytest.mark.parametrize("rows", [5, V, 100])
@pytest.mark.parametrize(("temperature", "kept_logits"), [(1.0, 2**27), (0.7, 0), (0.7, T * V // 2)])
def test_tiled_logprobs_equal_dense_forward_and_backward_for_every_tile_size(
    chunk, rows, temperature, masked, kept_logits, monkeypatch
):
    monkeypatch.setattr(logprobs, "CPU_KEPT", kept_logits)
    hidden, weight, labels = inputs()
    keeps, kept = kept_at_random(labels) if masked else (None, None)
    coefficients = torch.randn(2, T, dtype=torch.float64)

    def grads(pair):
        return torch.autograd.grad((torch.stack(pair) * coefficients).sum(), (hidden, weight), retain_graph=True)

    tiles = {"chunk_tokens": chunk, "chunk_rows": rows}
    found = chunked_logprobs(hidden, weight, labels, kept=kept, temperature=temperature, **tiles)
    expected = dense(hidden, weight, labels, temperature, keeps)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    first = grads(found)
    torch.testing.assert_close(first, grads(expected), rtol=0, atol=1e-10)
    assert all(map(torch.equal, grads(found), first))  # after the first backward no logits are kept


@pytest.mark.parametrize("frozen", [False, True])
def test_a_forward_without_a_backward_keeps_no_logits(frozen):
    hidden, weight, labels = inputs()
    logprob, _ = chunked_logprobs(hidden.detach() if frozen else hidden, weight, labels, chunk_rows=10)
    assert len(logprob.grad_fn.logits) == (0 if frozen else 4)
    with torch.no_grad():
        assert chunked_logprobs(hidden * 1, weight, labels)[0].grad_fn is None


def head_of(logits):
    """hidden [1, 1] and weight [V, 1] whose product is `logits` [V]."""
    return torch.ones(1, 1, dtype=logits.dtype), logits[:, None]


@pytest.mark.parametrize("offset", [0.0, 770.0])
@pytest.mark.parametrize("gap", [14.0, 21.0, 25.0])
def test_peaked_distribution_has_accurate_entropy_and_logprob(gap, offset):
    """At gap 25 the entropy is 3.6e-7 and the sum of exponentials cannot be told from 1 in float32."""
    logits = torch.full((1000,), offset)
    logits[3] += gap
    found = chunked_logprobs(*head_of(logits), torch.tensor([3]))
    expected = dense(*head_of(logits.double()), torch.tensor([3]), 1.0)
    for ours, exact in zip(found, expected, strict=True):
        assert exact.item() != 0
        assert ours.item() == pytest.approx(exact.item(), rel=2e-6)


@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0, 3000.0])
def test_entropy_is_never_negative(scale):
    torch.manual_seed(0)
    hidden, weight = scale * torch.randn(256, D), torch.randn(V, D)
    _, entropy = chunked_logprobs(hidden, weight, torch.zeros(256, dtype=torch.long))
    assert entropy.min() >= 0


def test_entropy_gradient_of_a_peaked_distribution_equals_autograd():
    logits = torch.zeros(50, dtype=torch.float64)
    logits[[3, 7]] = torch.tensor([783.0, 770.0], dtype=torch.float64)
    logits += 0.1 * torch.randn(50, dtype=torch.float64)

    def gradient(function, dtype, *arguments):
        hidden, weight = head_of(logits.to(dtype))
        weight.requires_grad_()
        return torch.autograd.grad(function(hidden, weight, torch.tensor([7]), *arguments)[1].sum(), weight)[0]

    exact = gradient(dense, torch.float64, 1.0)
    torch.testing.assert_close(gradient(chunked_logprobs, torch.float64), exact, rtol=1e-10, atol=0)
    logits = logits.float()  # what float32 logits say, then exactly
    exact = gradient(dense, torch.float64, 1.0)
    torch.testing.assert_close(gradient(chunked_logprobs, torch.float32).double(), exact, rtol=1e-5, atol=1e-15)


def test_bfloat16_logits_are_not_rounded():
    """Logits near 20 would be rounded to eighths: log-probabilities 6e-2 away, where 3e-6 is left."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 256).bfloat16(), (torch.randn(2000, 256) / 4).bfloat16()
    labels = torch.randint(0, 2000, (64,))
    exact = dense(hidden.double(), weight.double(), labels, 1.0)
    found = chunked_logprobs(hidden, weight, labels)
    assert (hidden.double() @ weight.double().T).max() > 16
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=2e-5)


def test_bfloat16_gradients_are_summed_in_float32():
    torch.manual_seed(0)
    hidden, weight = torch.randn(512, 32).bfloat16(), (torch.randn(64, 32) / 4).bfloat16()
    labels = torch.randint(0, 64, (512,))

    def gradients(function, dtype, **keywords):
        leaves = [t.to(dtype).requires_grad_() for t in (hidden, weight)]
        return torch.autograd.grad(function(*leaves, labels, **keywords)[0].sum(), leaves)

    for ours, exact in zip(
        gradients(chunked_logprobs, torch.bfloat16, chunk_tokens=8),
        gradients(dense, torch.float64, temperature=1.0),
        strict=True,
    ):
        assert (ours.double() - exact).norm() < 4e-3 * exact.norm()  # one rounding of each factor and of the result


@pytest.mark.parametrize("masked", [False, True])
def test_sharded_vocabulary_gives_equal_results_on_every_rank(monkeypatch, masked):
    """Three ranks as threads; the collective is a sum or maximum over them. Shards of unequal size."""
    hidden, weight, labels = inputs(3)
    keeps, kept = kept_at_random(labels) if masked else (None, None)
    weight = weight.detach().clone()
    weight[20] = weight[5]  # equal peaks on two ranks
    cuts = [0, 13, 26, V]
    barrier, posted = threading.Barrier(3), {}

    def all_reduce(t, group, op=dist.ReduceOp.SUM):
        posted[group] = t
        barrier.wait()
        together = torch.stack([posted[rank] for rank in range(3)])
        barrier.wait()
        return together.amax(0) if op == dist.ReduceOp.MAX else together.sum(0)

    monkeypatch.setattr(logprobs, "all_reduce", all_reduce)

    def rank(index):
        part = weight[cuts[index] : cuts[index + 1]].clone().requires_grad_()
        h = hidden.detach().clone().requires_grad_()
        tiles = {"chunk_tokens": 5, "chunk_rows": 6, "group": index, "first_row": cuts[index]}
        found = chunked_logprobs(h, part, labels, kept=kept, temperature=0.7, **tiles)
        return torch.stack(found), *torch.autograd.grad((found[0] + 0.3 * found[1]).sum(), (h, part))

    with ThreadPoolExecutor(3) as pool:
        values, hidden_parts, weight_parts = zip(*pool.map(rank, range(3)), strict=True)
    whole = weight.requires_grad_()
    expected = dense(hidden, whole, labels, 0.7, keeps)
    grads = torch.autograd.grad((expected[0] + 0.3 * expected[1]).sum(), (hidden, whole))
    for value in values:
        torch.testing.assert_close(value, torch.stack(expected), rtol=0, atol=1e-10)
    torch.testing.assert_close(sum(hidden_parts), grads[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(torch.cat(weight_parts), grads[1], rtol=0, atol=1e-10)


def test_compiled_tiles_equal_eager_tiles(monkeypatch):
    """Traced whole, with the in-place steps made functional, as any compiler gets them; generated code takes half a minute."""
    for name in ("_statistics", "_gradient"):
        traced = torch.compile(getattr(logprobs, name), backend="aot_eager", fullgraph=True)
        monkeypatch.setattr(logprobs, f"_compiled{name}", traced)
    hidden, weight, labels = inputs()

    def run(compile):
        pair = chunked_logprobs(hidden, weight, labels, chunk_tokens=5, compile=compile)
        grads = torch.autograd.grad((pair[0] + 0.3 * pair[1]).sum(), (hidden, weight), retain_graph=True)
        return *pair, *grads, *torch.autograd.grad(pair[0].sum(), (hidden, weight))

    with torch._dynamo.config.patch(disable=False):  # as on a GPU
        compiled = run(True)
    torch.testing.assert_close(compiled, run(False), rtol=0, atol=1e-12)
