import pytest
import torch

from torchtitan_rl.trainer.logprobs import LogprobHead, chunked_logprobs

T, D, V = 13, 8, 37


def inputs(seed: int = 0):
    torch.manual_seed(seed)
    hidden = torch.randn(T, D, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, D, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(0, V, (T,))


def dense(hidden, weight, labels, temperature):
    """log p(label) and entropy by the definitions, with the whole [T, V] in memory."""
    logp = (hidden @ weight.T / temperature).log_softmax(-1)  # [T, V]
    return logp.gather(-1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("chunk", [1, 4, 5, T, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_every_chunk_size_equals_dense_forward_and_backward(chunk, temperature):
    hidden, weight, labels = inputs()
    coefficients = torch.randn(2, T, dtype=torch.float64)

    def grads(pair):
        return torch.autograd.grad((torch.stack(pair) * coefficients).sum(), (hidden, weight))

    found = chunked_logprobs(hidden, weight, labels, temperature=temperature, chunk_tokens=chunk)
    expected = dense(hidden, weight, labels, temperature)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(grads(found), grads(expected), rtol=0, atol=1e-10)


def test_gradcheck():
    hidden, weight, labels = inputs(1)
    assert torch.autograd.gradcheck(lambda h, w: chunked_logprobs(h, w, labels, chunk_tokens=4), (hidden, weight))


def test_large_logits_stay_finite():
    hidden, weight, labels = inputs()
    logprobs, entropy = chunked_logprobs(1e3 * hidden.detach().float(), weight.detach().float(), labels)
    assert torch.isfinite(logprobs).all()
    assert torch.isfinite(entropy).all()


def test_head_gives_logits_outside_scoring_and_logprobs_inside():
    head = LogprobHead.Config(in_features=D, out_features=V, chunk_tokens=3).build()
    hidden, labels = torch.randn(1, T, D), torch.randint(0, V, (T,))
    assert head(hidden).shape == (1, T, V)
    with head.scoring(labels, 0.5):
        out = head(hidden)
    logprobs, entropy = dense(hidden[0], head.weight, labels, 0.5)
    torch.testing.assert_close(out[0], torch.stack([logprobs, entropy], -1), rtol=1e-5, atol=1e-5)
    assert head(hidden).shape == (1, T, V)
