"""Experts over a pack: as exact as a loop over them, without its padding, and counted."""

import pytest
import torch
import torch.nn.functional as F

from torchtitan_rl.models.mixture_of_experts import MixtureOfExperts
from torchtitan_rl.types import NO_RECORD

EXPERTS, DIM, HIDDEN, TOP_K = 6, 32, 24, 2


def moe(padding: int = 0):
    """A random mixture whose next pack ends with `padding` rows."""
    torch.manual_seed(0)
    mixture = MixtureOfExperts(
        num_experts=EXPERTS, num_experts_per_tok=TOP_K, moe_intermediate_size=HIDDEN, norm_topk_prob=True
    )
    made = mixture.config(DIM).build()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    made.padding = padding
    return made


def routed(model, row):
    """A token's probabilities [E] of the experts, and those that the router chooses [K]."""
    probabilities = (row @ model.router.gate.weight.T).softmax(-1)
    return probabilities, probabilities.topk(TOP_K).indices


def loop(model, x, choices=None):
    """The same with a loop over tokens and their experts, [T, D] -> [T, D]. `choices`: of each token; None: the router's."""
    experts, rows = model.routed_experts.inner_experts, []
    for i, row in enumerate(x):
        probabilities, chosen = routed(model, row)
        chosen = chosen if choices is None else choices[i]
        out = 0
        for weight, expert in zip(probabilities[chosen] / probabilities[chosen].sum(), chosen, strict=True):
            inner = F.silu(row @ experts.w1_EFD[expert].T) * (row @ experts.w3_EFD[expert].T)
            out = out + weight * (inner @ experts.w2_EDF[expert].T)
        rows.append(out)
    return torch.stack(rows)


def gradients(model, out, target):
    model.zero_grad()
    (out * target).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_outputs_and_gradients_equal_a_loop_over_tokens():
    model, x, target = moe(), torch.randn(37, DIM), torch.randn(37, DIM)
    out = model(x[None])[0]
    assert torch.allclose(out, loop(model, x), atol=1e-5)
    ours, theirs = gradients(model, out, target), gradients(model, loop(model, x), target)
    for name, gradient in theirs.items():
        assert torch.allclose(ours[name], gradient, atol=1e-4), name


def test_bfloat16_routes_as_float32_does_and_loses_no_token():
    rounded, exact, x = moe().bfloat16(), moe(), torch.randn(1, 3001, DIM).bfloat16()
    exact.load_state_dict(rounded.state_dict())
    seen = []
    for model in (rounded, exact):
        experts = model.routed_experts.inner_experts
        experts.register_forward_pre_hook(lambda _, args: seen.append(args))
    out, expected = rounded(x), exact(x.float())
    [(rows, numbers), (_, of_exact)] = seen
    assert numbers.sum() == len(rows) == 3001 * TOP_K
    assert torch.equal(numbers, of_exact)  # up to 1,153, where bfloat16 has steps of 8
    assert (out - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("padding", [1, 30, 37])
def test_padding_is_not_routed_not_counted_and_without_gradient(padding):
    model, x = moe(padding), torch.randn(37, DIM, requires_grad=True)
    kept = 37 - padding
    out = model(x[None])[0]
    assert torch.equal(out[kept:], torch.zeros(padding, DIM))
    assert model.tokens_per_expert_E.sum() == kept * TOP_K
    found = gradients(model, out, torch.ones_like(out))
    assert not x.grad[kept:].any()
    whole = moe()
    alone = whole(x.detach()[None, :kept])[0]
    assert torch.equal(alone, out[:kept])
    expected = gradients(whole, alone, torch.ones_like(alone))
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_counts_and_entropy_are_those_of_the_routers_choice():
    model, x = moe(), torch.randn(37, DIM)
    model(x[None])
    probabilities = (x @ model.router.gate.weight.T).softmax(-1)  # [37, E]
    chosen = probabilities.topk(TOP_K).indices
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
    entropy = -(probabilities * probabilities.log()).sum()
    taken = model.take_counts()
    assert torch.equal(taken[:EXPERTS], counts.float())
    assert float(taken[EXPERTS]) == pytest.approx(float(entropy), rel=1e-5)


def test_replayed_tokens_go_to_the_recorded_experts_with_the_routers_own_weights():
    model, x, target = moe(padding=3), torch.randn(20, DIM), torch.randn(20, DIM)
    recorded = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(20)])  # [T, K]
    recorded[[2, 9]] = NO_RECORD
    model.replayed = recorded.to(torch.uint8)
    own = [routed(model, row)[1] for row in x]
    chosen = [mine if record[0] == NO_RECORD else record for mine, record in zip(own, recorded, strict=True)]
    otherwise = sum(
        set(mine.tolist()) != set(other.tolist()) for mine, other in zip(own[:17], chosen[:17], strict=True)
    )
    expected = torch.cat([loop(model, x[:17], chosen), torch.zeros(3, DIM)])
    out = model(x[None])[0]
    assert torch.allclose(out, expected, atol=1e-5)
    assert model.take_counts()[-2:].tolist() == [15, otherwise]
    assert not model.take_counts().any()
    ours, theirs = gradients(model, out, target), gradients(model, expected, target)
    for name, gradient in theirs.items():
        assert torch.allclose(ours[name], gradient, atol=1e-4), name
    assert ours["router.gate.weight"].abs().max() > 1e-3
