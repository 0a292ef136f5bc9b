import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl.trainer.packing import atoms_of, pack, plan_microbatches, split_groups
from torchtitan_rl.types import Episode, Normalizers

COUNTS = Normalizers(num_tokens=10, num_sequences=3, num_groups=2, max_completion_tokens=8)


def episode(prompt=(5, 6, 7), tokens=(8, 9), *, prompt_idx=0, sample_idx=0, advantage=1.0, in_loss=True) -> Episode:
    return Episode(
        policy_version=0, prompt_idx=prompt_idx, sample_idx=sample_idx, prompt="", response="", expected_answer="",
        answer=None, prompt_token_ids=list(prompt), token_ids=list(tokens), finish_reason="stop", reward=1.0,
        sampler_logprobs=[-0.5 - i for i in range(len(tokens))], reward_breakdown={}, extra={}, group_size=1,
        advantage=advantage, in_loss=in_loss,
    )  # fmt: skip


def test_each_position_speaks_of_the_token_it_predicts():
    batch = pack([episode(), episode((1,), (2, 3, 4), advantage=-2.0)], [0, 1], normalizers=COUNTS, multiple=8)
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9, 1, 2, 3, 4] + [0] * 7
    assert batch.labels.tolist()[:9] == [6, 7, 8, 9, 0, 2, 3, 4, 0]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3] + list(range(7))
    assert batch.loss_mask.tolist() == [0, 0, 1, 1, 0, 1, 1, 1, 0] + [0] * 7
    assert batch.sampler_logprobs.tolist()[:9] == [0, 0, -0.5, -1.5, 0, -0.5, -1.5, -2.5, 0]
    assert batch.advantages.tolist()[:9] == [0, 0, 1, 1, 0, -2, -2, -2, 0]
    assert batch.sequence_ids.tolist() == [0] * 5 + [1] * 4 + [2] * 7


def test_an_empty_micro_batch_is_only_padding():
    batch = pack([episode()], [], normalizers=COUNTS, multiple=8)
    assert batch.token_ids.shape == (8,)
    assert batch.loss_mask.sum() == 0
    assert batch.sequence_ids.tolist() == [0] * 8  # S = 0, so padding has id 0 = S


def test_reference_logprobs_need_every_episode_to_have_them():
    one, two = episode(), episode()
    one.reference_logprobs = [-1.0, -2.0]
    assert pack([one, two], [0, 1], normalizers=COUNTS, multiple=1).reference_logprobs is None
    two.reference_logprobs = [-3.0, -4.0]
    batch = pack([one, two], [0, 1], normalizers=COUNTS, multiple=1)
    assert batch.reference_logprobs.tolist() == [0, 0, -1, -2, 0, 0, 0, -3, -4, 0]


@given(
    st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=4), max_size=30),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.integers(10, 120),
)
def test_plan_holds_each_atom_once_within_budget_with_equal_counts(sizes, num_ranks, max_tokens):
    plans = plan_microbatches(sizes, num_ranks=num_ranks, max_tokens=max_tokens)
    assert sorted(atom for plan in plans for batch in plan for atom in batch) == list(range(len(sizes)))
    assert len({len(plan) for plan in plans}) == 1
    assert len(plans[0]) >= 1
    for batch in (batch for plan in plans for batch in plan):
        assert len(batch) == 1 or sum(sum(sizes[atom]) for atom in batch) <= max_tokens


def test_work_is_balanced_over_ranks():
    sizes = [[n] for n in (100, 90, 80, 30, 20, 10, 10, 10)]
    plans = plan_microbatches(sizes, num_ranks=2, max_tokens=1000)
    loads = [sum(sizes[atom][0] for batch in plan for atom in batch) for plan in plans]
    assert max(loads) - min(loads) <= 10


def test_atoms_are_episodes_or_whole_groups_in_the_loss():
    episodes = [
        episode(prompt_idx=0), episode(prompt_idx=0, in_loss=False), episode(prompt_idx=1), episode(prompt_idx=0),
        episode(prompt_idx=1, tokens=()),
    ]  # fmt: skip
    assert atoms_of(episodes, whole_groups=False) == [[0], [2], [3]]
    assert atoms_of(episodes, whole_groups=True) == [[0, 3], [2]]


@pytest.mark.parametrize(("parts", "sizes"), [(1, [6]), (2, [4, 2]), (3, [2, 2, 2]), (5, [2, 2, 2])])
def test_mini_batches_hold_whole_groups(parts, sizes):
    episodes = [episode(prompt_idx=i // 2, sample_idx=i % 2) for i in range(6)]
    split = split_groups(episodes, parts)
    assert [len(part) for part in split] == sizes
    for part in split:
        assert all(sum(e.prompt_idx == idx for e in part) == 2 for idx in {e.prompt_idx for e in part})


def test_packed_tensors_are_on_the_device():
    batch = pack([episode()], [0], normalizers=COUNTS, multiple=1)
    assert batch.token_ids.device.type in ("cpu", "cuda")
    assert batch.token_ids.dtype == torch.int64
