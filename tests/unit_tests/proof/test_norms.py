import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_rl.proof import norms
from torchtitan_rl.proof.norms import StepNorms


@pytest.fixture(params=[1, 8])
def world_size(request):
    """A process group of which this is the only real rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


def whole(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


class Container(list):
    """Optimizers as torchtitan's container has them."""

    def step(self):
        for one in self:
            one.step()


class Lion(torch.optim.Optimizer):
    """w <- w - lr sign(b1 m + (1 - b1) g), with one moment and no count of steps. Chen et al., arXiv 2302.06675."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                moment = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.sub_(group["lr"] * torch.lerp(p.grad, moment, group["betas"][0]).sign())
                moment.lerp_(p.grad, 1 - group["betas"][1])


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))


def gradients(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.randn(2, 7)).square().sum().backward()


@pytest.mark.parametrize("world_size", [1], indirect=True)
@pytest.mark.parametrize("fused", [False, True])
def test_update_norm_of_adamw_excludes_weight_decay(world_size, fused, monkeypatch):
    monkeypatch.setattr(norms, "BLOCK", 4)  # a weight is several
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9), weight_decay=0.5, fused=fused)
    norms_of = StepNorms(Container([optimizer]))
    assert norms_of.update_and_weight_norm() == pytest.approx((0, float(whole(model).norm())))
    assert not optimizer.state, "an entry for a parameter would be taken for the state of a step"
    for _ in range(4):
        gradients(model)
        decayed = (1 - 1e-2 * 0.5) * whole(model)
        optimizer.step()
        expected = float((whole(model) - decayed).norm()), float(whole(model).norm())
        assert norms_of.update_and_weight_norm() == pytest.approx(expected, rel=1e-5)


def by_shape(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2])]


@pytest.mark.parametrize("world_size", [1], indirect=True)
@pytest.mark.parametrize(
    "optimizers",
    [
        lambda model: [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)],
        lambda model: [Lion(model.parameters())],
        lambda model: [torch.optim.AdamW(model.parameters(), amsgrad=True, weight_decay=0)],
        lambda model: [torch.optim.NAdam(model.parameters())],
    ],
    ids=["SGD", "Lion", "amsgrad", "NAdam"],
)
def test_update_norm_of_other_optimizers_is_the_change_of_weights(world_size, optimizers):
    model = small_model()
    container = Container(optimizers(model))
    norms_of = StepNorms(container)
    for _ in range(3):
        gradients(model)
        before = whole(model)
        container.step()
        expected = float((whole(model) - before).norm()), float(whole(model).norm())
        assert norms_of.update_and_weight_norm() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("world_size", [1], indirect=True)
def test_update_norm_combines_muon_and_adamw(world_size):
    model = small_model()
    container = Container(by_shape(model))
    norms_of = StepNorms(container)
    for _ in range(3):
        gradients(model)
        before = whole(model)
        container.step()
        change = float((whole(model) - before).norm())
        assert norms_of.update_and_weight_norm()[0] == pytest.approx(
            change, rel=2e-3
        )  # AdamW's is without weight decay


def test_non_finite_weight_gives_a_non_finite_norm(world_size):
    weight = nn.Parameter(torch.tensor([1.0, float("nan")]))
    norms_of = StepNorms(Container([torch.optim.AdamW([weight])]))
    assert not torch.isfinite(torch.tensor(norms_of.update_and_weight_norm()[1]))


@pytest.mark.parametrize("world_size", [8], indirect=True)
@pytest.mark.parametrize(
    ("placements", "copies"),
    [
        ((Replicate(), Replicate(), Replicate()), 8),
        ((Replicate(), Shard(0), Replicate()), 4),
        ((Replicate(), Shard(0), Shard(1)), 2),
        ((Replicate(), _StridedShard(0, split_factor=2), Shard(0)), 2),  # FSDP over rows that TP has split
        ((Shard(0), Shard(0), Shard(0)), 1),
    ],
)
def test_replicated_values_count_once_in_the_norm(world_size, placements, copies):
    mesh = init_device_mesh("cpu", (2, 2, 2))
    t = DTensor.from_local(torch.ones(4, 4), mesh, placements, run_check=False, shape=(8, 8), stride=(8, 1))
    assert norms._share_of_ranks(t) == 1 / copies
