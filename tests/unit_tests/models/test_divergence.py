from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.parts.algorithm import dense_divergence
from torchtitan_rl.models.divergence import TeacherOutput, chunked_divergence

T, D, DT, V = 13, 8, 5, 37
BETAS = [1.0, 0.0, 0.5, 0.1]
"""Reverse KL, forward KL and two generalised Jensen-Shannon divergences."""


def inputs(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    hidden, weight = torch.randn(T, D, dtype=dtype).requires_grad_(), torch.randn(V, D, dtype=dtype).requires_grad_()
    return hidden, weight, TeacherOutput(torch.randn(T, DT, dtype=dtype), torch.randn(V, DT, dtype=dtype))


def dense(hidden, weight, teacher, beta, temperature=1.0):
    """The divergences by their definitions, with both [T, V] in memory."""
    p, q = ((h @ w.T / temperature).softmax(-1) for h, w in ((hidden, weight), teacher[:2]))  # [T, V] each
    return dense_divergence(p, q, beta)


def with_gradients(divergence, hidden, weight):
    """The divergence and its gradients to hidden and weight, each token with a coefficient of its own."""
    coefficients = torch.linspace(-1, 2, T, dtype=divergence.dtype)
    return divergence, *torch.autograd.grad((divergence * coefficients).sum(), (hidden, weight))


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("chunk", [1, 5, T, 100])
@pytest.mark.parametrize("rows", [5, V, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tiled_logprobs_equal_dense_forward_and_backward_for_every_tile_size(beta, chunk, rows, temperature):
    hidden, weight, teacher = inputs()
    found, _ = chunked_divergence(
        hidden, weight, teacher, beta=beta, temperature=temperature, chunk_tokens=chunk, chunk_rows=rows
    )
    expected = dense(hidden, weight, teacher, beta, temperature)
    torch.testing.assert_close(
        with_gradients(found, hidden, weight), with_gradients(expected, hidden, weight), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("beta", [1.0, 0.0])
def test_a_small_divergence_of_peaked_distributions_keeps_its_digits(beta):
    """The divergence is below 1e-7, far below the rounding of each term that adds up to it."""
    logits = torch.zeros(1000)
    logits[3] = 20.0
    other = logits.clone()
    other[3] = 20.25
    one = torch.ones(1, 1)
    found, _ = chunked_divergence(one, logits[:, None], TeacherOutput(one, other[:, None]), beta=beta)
    exact = dense(one.double(), logits[:, None].double(), TeacherOutput(one.double(), other[:, None].double()), beta)
    assert 0 < exact.item() < 1e-6
    assert found.item() == pytest.approx(exact.item(), rel=1e-3)


def test_bfloat16_logits_are_not_rounded():
    torch.manual_seed(0)
    student, teacher = ((torch.randn(64, 256).bfloat16(), (torch.randn(2000, 256) / 4).bfloat16()) for _ in range(2))
    found, _ = chunked_divergence(*student, TeacherOutput(*teacher))
    exact = dense(*(t.double() for t in student), [t.double() for t in teacher], 1.0)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=2e-5)


CUTS = [19, V]
"""The first row of the second rank, which has none the second time."""


def _rank(rank, store, results):
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    hidden, whole, teacher = inputs(5)
    for cut in CUTS:
        rows = slice(0, cut) if rank == 0 else slice(cut, V)
        weight = whole.detach()[rows].clone().requires_grad_()
        mine = TeacherOutput(teacher.hidden, teacher.weight[rows])
        for beta in BETAS:
            divergence, best = chunked_divergence(
                hidden, weight, mine, beta=beta, temperature=0.7, chunk_tokens=5, chunk_rows=6, group=dist.group.WORLD,
                first_row=rows.start,
            )  # fmt: skip
            tensors = *with_gradients(divergence, hidden, weight), best
            torch.save([t.detach() for t in tensors], f"{results}/{cut}-{beta}-{rank}")
    dist.destroy_process_group()


def test_a_vocabulary_sharded_over_two_ranks_equals_dense(tmp_path):
    mp.spawn(_rank, args=(str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    hidden, weight, teacher = inputs(5)
    for cut, beta in product(CUTS, BETAS):
        ranks = [torch.load(tmp_path / f"{cut}-{beta}-{rank}") for rank in range(2)]
        values, hidden_parts, weight_parts, best = zip(*ranks, strict=True)
        expected = with_gradients(dense(hidden, weight, teacher, beta, 0.7), hidden, weight)
        torch.testing.assert_close(values[0], values[1], rtol=0, atol=0)
        found = values[0], sum(hidden_parts), torch.cat(weight_parts)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        for one in best:
            assert torch.equal(one, (teacher.hidden @ teacher.weight.T).argmax(-1))
