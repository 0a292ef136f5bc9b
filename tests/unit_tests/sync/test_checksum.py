"""A checksum sees every bit and every place, and adds up over parts."""

import itertools

import pytest
import torch

from torchtitan_rl.device import ON_CPU
from torchtitan_rl.sync.checksum import Matrices, place_weights
from torchtitan_rl.sync.shard_checksums import ShardChecksums

SHAPES = [(7, 5), (3, 513), (600, 36), (5, 1200), (1, 1)]


def matrix(shape, dtype):
    torch.manual_seed(0)
    return torch.randn(shape).to(dtype)


def weights(rows):
    return place_weights(torch.arange(rows.start, rows.stop))[None]


def checksums(matrices, weights, first_column=0, dtype=None):
    reads = [lambda matrix=matrix: matrix for matrix in matrices]
    return Matrices(weights, first_column, 1.0, reads, []).checksums(dtype or matrices[0].dtype)


def checksum(whole):
    return int(checksums([whole], weights(range(len(whole)))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_checksums_of_parts_add_up_to_the_whole(shape, dtype):
    whole, (height, width) = matrix(shape, dtype), shape
    rows, columns = sorted({0, height // 3, height // 2, height}), sorted({0, width // 3, width - 1, width})
    parts = [
        checksums([whole[top:bottom, left:right]], weights(range(top, bottom)), first_column=left)
        for (top, bottom), (left, right) in itertools.product(itertools.pairwise(rows), itertools.pairwise(columns))
    ]
    assert int(sum(reversed(parts))) == checksum(whole)


@pytest.mark.parametrize(("dtype", "integer"), [(torch.float32, torch.int32), (torch.bfloat16, torch.int16)])
def test_changing_any_bit_changes_the_checksum(dtype, integer):
    whole = matrix((3, 5), dtype)
    found = {checksum(whole)}
    for row, column, bit in itertools.product(range(3), range(5), range(8 * dtype.itemsize)):
        flipped = whole.view(integer).clone()
        flipped[row, column] ^= torch.tensor(-(2**bit) if bit == 8 * dtype.itemsize - 1 else 2**bit, dtype=integer)
        found.add(checksum(flipped.view(dtype)))
    assert len(found) == 1 + 15 * 8 * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1])
def test_swapping_two_rows_or_columns_changes_the_checksum(dtype, dim):
    whole = matrix((40, 600) if dim else (600, 40), dtype)
    found = {checksum(whole)}
    swaps = [(0, 1), (3, 511), (511, 512), (5, 517), (598, 599)]
    for one, other in swaps:
        order = torch.arange(600)
        order[[one, other]] = order[[other, one]]
        found.add(checksum(whole.index_select(dim, order)))
    assert len(found) == 1 + len(swaps)


def test_moved_elements_change_the_checksum():
    whole = matrix((32, 32), torch.float32)
    signs = torch.ones(4, 8)
    signs[0, 1] = signs[2, 3] = -1.0
    for one, other in ((whole, whole.t()), (signs, signs.abs()), (signs, signs.roll(1, 1))):
        assert checksum(one) != checksum(other)


def test_values_are_cast_before_the_checksum():
    whole = matrix((9, 7), torch.float32)
    cast = checksums([whole], weights(range(9)), dtype=torch.bfloat16)
    assert int(cast) == checksum(whole.to(torch.bfloat16)) != checksum(whole)


def test_rows_of_weight_0_are_excluded_from_the_checksum():
    whole, kept = matrix((6, 7), torch.float32), weights(range(6))
    kept[0, 4:] = 0
    assert int(checksums([whole], kept)) == checksum(whole[:4])


def test_vector_is_summed_as_one_column():
    vector = matrix((5,), torch.bfloat16)
    assert checksum(vector) == checksum(vector[:, None]) != checksum(vector.roll(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.skipif(not ON_CPU, reason="a GPU engine's matrices are not read back by products")
def test_subnormal_values_count_as_zero_on_a_cpu(dtype):
    assert checksum(torch.tensor([-0.0, 1e-39], dtype=dtype)) == checksum(torch.zeros(2, dtype=dtype))


def test_a_rank_without_rows_of_a_matrix_adds_nothing_to_its_checksums(one_rank):
    none, two_rows = torch.zeros(0, 64), torch.ones(2, 64)
    no_rows = torch.arange(0)
    fused = dict.fromkeys("qkv", no_rows)  # one matrix under three names
    shards = ShardChecksums([(none, fused), (none, {"up": no_rows}), (two_rows, {"down": torch.arange(2)})])
    *of_none, of_two = shards.checksums(torch.float32).tolist()
    assert of_none == [0, 0, 0, 0]
    assert of_two != 0
