"""What every rank holds in common is compared, and what differs is named with the ranks."""

import multiprocessing

import numpy as np
import pytest
import torch.distributed as dist

from tests.parts.algorithm import group
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.replicated import check_config, check_replicated, checksums_of
from torchtitan_rl.trainer.gate import LogprobDiffs

RANKS = 3


def on_ranks(act, store_file):
    """What `act(rank)` raised on each of three ranks, as text; "" for nothing."""
    spawn = multiprocessing.get_context("fork")
    answers = spawn.Queue()

    def one(rank):
        dist.init_process_group("gloo", store=dist.FileStore(str(store_file), RANKS), rank=rank, world_size=RANKS)
        try:
            act(rank)
            answers.put((rank, ""))
        except Exception as error:
            answers.put((rank, f"{type(error).__name__}: {error}"))
        dist.barrier()

    children = [spawn.Process(target=one, args=(rank,)) for rank in range(RANKS)]
    for child in children:
        child.start()
    found = dict(answers.get(timeout=60) for _ in children)
    for child in children:
        child.join(10)
        child.kill()
    return [found[rank] for rank in range(RANKS)]


def episodes(*rewards):
    return draft_episodes([group(0, list(rewards))])


def test_equal_ranks_pass_the_check(tmp_path):
    def act(rank):
        check_config({"seed": 0, "task": "SumDigits"})
        check_replicated(3, [episodes(1.0, 0.0)[0].prompt])
        check_replicated(3, episodes(1.0, 0.0))

    assert on_ranks(act, tmp_path / "store") == ["", "", ""]


def test_config_difference_is_reported_with_field_value_and_rank_on_every_rank(tmp_path):
    found = on_ranks(lambda rank: check_config({"seed": rank % 2, "num_steps": 3 + (rank == 2)}), tmp_path / "store")
    assert len(set(found)) == 1
    assert found[0].startswith(
        "UserError: config: it differs between the ranks: seed is 0 on ranks 0, 2, 1 on rank 1; num_steps is 3 on ranks 0, 1, "
        "4 on rank 2. Start every node with"
    )


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda rank: (rank, episodes(1.0, 0.0)), "the steps"),
        (lambda rank: (3, episodes(1.0, 0.25 * (rank == 1))), "the rewards"),
    ],
)
def test_differing_episodes_are_reported_on_every_rank(tmp_path, change, name):
    found = on_ranks(lambda rank: check_replicated(*change(rank)), tmp_path / "store")
    assert all(f"{name} differ between the ranks: they are not the same on " in text for text in found)
    if name == "the rewards":
        assert found[0].startswith("TrainingStopped: step 3: ")
        assert "not the same on ranks 0, 2 and on rank 1. Every rank" in found[0]


def test_the_gate_of_each_rank_sees_the_differences_of_all(tmp_path):
    def act(rank):
        diffs = LogprobDiffs()
        diffs.add(np.array([0.1 * rank, 0.0]))
        merged = diffs.merged()
        assert (merged.largest, merged.total) == (0.2, pytest.approx(0.3))

    assert on_ranks(act, tmp_path / "store") == ["", "", ""]


def test_each_kind_of_difference_changes_its_own_checksum():
    before = checksums_of(episodes(1.0, 0.0))
    assert checksums_of(episodes(1.0, 0.0)) == before
    other = episodes(1.0, 0.0)
    other[0].samples[0].credit.advantage = 1e-12
    assert [name for name, number in checksums_of(other).items() if number != before[name]] == ["the advantages"]
    other = episodes(1.0, 0.0)
    other[0].samples[1].completion.token_ids[1] += 1
    assert [name for name, number in checksums_of(other).items() if number != before[name]] == ["the completions"]
