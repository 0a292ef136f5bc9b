"""`score` on a tiny policy: the values of every position, or of those that were asked for."""

import pytest
import torch

from tests.parts.tiny import save_tiny_checkpoint
from tests.parts.tiny_trainer import tiny_trainer
from torchtitan_rl.models import logprobs
from torchtitan_rl.models.score import attention_masks, score
from torchtitan_rl.types import SegmentLayout

T = 13


@pytest.fixture(scope="module")
def model(one_rank, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_checkpoint(path)
    return tiny_trainer(str(path)).model


def packed() -> tuple[torch.Tensor, torch.Tensor, SegmentLayout]:
    """T tokens of two sequences, and labels."""
    tokens, labels = torch.randint(0, 100, (2, T), generator=torch.Generator().manual_seed(0))
    return tokens, labels, SegmentLayout.of([5, 8], device="cpu")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("wanted", [None, [0, 4, 12], []])
def test_wanted_positions_alone_are_scored_and_have_a_gradient(model, wanted, temperature, monkeypatch):
    seen, product = [], logprobs.product
    monkeypatch.setattr(logprobs, "product", lambda a, b: seen.append(len(a)) or product(a, b))
    tokens, labels, layout = packed()
    only = None if wanted is None else torch.tensor(wanted, dtype=torch.long)
    places = list(range(T)) if wanted is None else wanted

    def gradients(values: torch.Tensor) -> torch.Tensor:
        values.sum().backward()
        found = torch.cat([p.grad.to_local().flatten() for p in model.parameters()])
        model.zero_grad()
        return found

    scores = score(model, tokens, labels, layout, temperature, only)
    assert set(seen) <= {len(places)}
    assert scores.columns == {}
    ours = gradients(scores.logprobs)
    with model.lm_head.computing(lambda found: found.hidden @ found.weight.T):
        logits = model(tokens[None], layout.positions[None], attention_masks(model, layout))  # [T, V]
    logp = (logits / temperature).log_softmax(-1)  # [T, V]
    expected = logp.gather(-1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)  # [T] each
    for found, exact in zip(scores, expected, strict=False):
        torch.testing.assert_close(found[places], exact[places], rtol=1e-5, atol=1e-5)
        assert found.count_nonzero() == len(places)
    torch.testing.assert_close(ours, gradients(expected[0][places]), rtol=1e-4, atol=1e-5)
