"""`comm.all_gather_lists` between real processes."""

from torchtitan_rl import device  # noqa: F401  (before torchtitan, in the spawned processes)

# isort: split
import numpy as np
import torch.distributed as dist
import torch.multiprocessing as mp

from torchtitan_rl import comm
from torchtitan_rl.types import Completion


def item(rank: int, position: int) -> dict:
    """Arrays of every awkward form beside plain values."""
    grid = np.arange(12, dtype=np.float32).reshape(3, 4) + 100 * rank + position
    return {
        "rank": rank,
        "strided": grid[:, ::2],
        "column_order": np.asfortranarray(grid),
        "empty": grid[:0],
        "scalar": np.float32(rank),
        "zero_d": np.array(position),
        "read_only": np.frombuffer(b"\x01\x02\x03", dtype=np.uint8),
        "completion": Completion(
            sample_idx=position, policy_version=rank, token_ids=[1, 2, 3], sampler_logprobs=[-0.5, 0, -1.0], text="é",
            finish_reason="stop", loss_mask=[True, False, True],
        ),
    }  # fmt: skip


def items(rank: int) -> list[dict]:
    """As many as the rank's number: rank 0 has none."""
    return [item(rank, position) for position in range(rank)]


def gather_and_compare(rank: int, world_size: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    found = comm.all_gather_lists(items(rank))
    expected = [one for sender in range(world_size) for one in items(sender)]
    assert [one["rank"] for one in found] == [one["rank"] for one in expected]
    for ours, theirs in zip(found, expected, strict=True):
        completion, sent = ours.pop("completion"), theirs.pop("completion")
        assert completion.text == sent.text
        for name in ("token_ids", "sampler_logprobs", "loss_mask"):
            ours[name], theirs[name] = getattr(completion, name), getattr(sent, name)
        for name, value in theirs.items():
            np.testing.assert_array_equal(ours[name], value, err_msg=name)
            assert getattr(ours[name], "dtype", None) == getattr(value, "dtype", None), name
        assert ours["sampler_logprobs"].dtype == np.float32
    assert comm.all_gather_lists([]) == []
    assert comm.all_gather_lists([rank]) == [0, 1, 2]
    write_into_what_arrived(rank)
    dist.destroy_process_group()


def test_every_rank_gets_a_copy_of_every_item_in_rank_order(tmp_path):
    mp.spawn(gather_and_compare, (3, str(tmp_path / "store")), nprocs=3)


def write_into_what_arrived(rank: int) -> None:
    mine = item(rank, 1)
    found = comm.all_gather_lists([mine])
    for one in found:
        one["completion"].token_ids[0] = 9
        one["strided"] *= 2
        assert not one["read_only"].flags.writeable  # as it was sent
    assert mine["completion"].token_ids[0] == 1
    np.testing.assert_array_equal(mine["strided"] * 2, found[rank]["strided"])


def test_what_a_loss_writes_into_is_a_copy_of_its_own_on_one_rank(one_rank):
    write_into_what_arrived(0)
