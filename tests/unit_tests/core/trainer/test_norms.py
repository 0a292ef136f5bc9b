import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_rl.core.trainer import norms
from torchtitan_rl.core.trainer.norms import update_and_weight_norm


@pytest.fixture(params=[1, 8])
def world_size(request):
    """A process group of which this is the only real rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


def whole(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


@pytest.mark.parametrize("world_size", [1], indirect=True)
@pytest.mark.parametrize("fused", [False, True])
def test_the_update_is_what_adamw_does_without_weight_decay(world_size, fused, monkeypatch):
    monkeypatch.setattr(norms, "BLOCK", 4)  # a weight is several
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9), weight_decay=0.5, fused=fused)
    assert update_and_weight_norm([optimizer]) == pytest.approx((0, float(whole(model).norm())))
    for _ in range(4):
        model(torch.randn(2, 7)).square().sum().backward()
        decayed = (1 - 1e-2 * 0.5) * whole(model)
        optimizer.step()
        optimizer.zero_grad()
        expected = float((whole(model) - decayed).norm()), float(whole(model).norm())
        assert update_and_weight_norm([optimizer]) == pytest.approx(expected, rel=1e-5)


def test_a_weight_that_is_not_finite_makes_the_norm_so(world_size):
    weight = nn.Parameter(torch.tensor([1.0, float("nan")]))
    assert not torch.isfinite(torch.tensor(update_and_weight_norm([torch.optim.AdamW([weight])])[1]))


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
def test_a_value_that_several_ranks_hold_counts_once(world_size, placements, copies):
    mesh = init_device_mesh("cpu", (2, 2, 2))
    t = DTensor.from_local(torch.ones(4, 4), mesh, placements, run_check=False, shape=(8, 8), stride=(8, 1))
    assert norms._share_of_ranks(t) == 1 / copies
