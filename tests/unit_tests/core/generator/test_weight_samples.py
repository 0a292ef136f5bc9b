"""Which elements of a weight a look sees: of some rows some, in every share some, and in the end all."""

import pytest
import torch

from torchtitan_rl.core.generator.weight_samples import BLOCK, part_of, rows_one_in, sampled_columns


def matrix(height, width):
    """Each element is its own number."""
    return torch.arange(height * width).reshape(height, width)


def whole(height, width):
    rows = torch.arange(height)
    return part_of(rows, height, width, slice(0, width), rows)


def rows_of(sample, width):
    """[rows, block] of a sample of a matrix."""
    return sample.view(-1, BLOCK if width % 64 == 0 else 1)


@pytest.mark.parametrize(
    ("height", "width", "looks"),
    [(9, 64, 64), (100, 128, 128), (320, 128, 320), (2048, 64, 512), (5000, 64, 512), (8, 100, 800), (9, 1, 1)],
)
def test_the_first_looks_have_some_of_every_row_and_all_looks_together_every_element_once(height, width, looks):
    one, values = whole(height, width), matrix(height, width)
    seen = [one.sample(values, turn)[1].flatten() for turn in range(looks)]
    assert len((torch.cat(seen[: rows_one_in(height)]) // width).unique()) == height
    assert torch.cat(seen).sort().values.tolist() == values.flatten().tolist()


@pytest.mark.parametrize("height", [1, 2, 5, 8])
def test_each_look_has_some_of_a_matrix_of_few_rows(height):
    one, values = whole(height, 64), matrix(height, 64)
    assert all(one.sample(values, turn)[1].numel() for turn in range(9))


@pytest.mark.parametrize(("width", "degree"), [(64, 2), (128, 4), (512, 8), (100, 2)])
def test_the_shares_of_columns_have_together_what_the_whole_has_and_each_has_some(width, degree):
    height, turn, size = 100, 3, width // degree
    values, rows = matrix(height, width), torch.arange(height)
    _, sent = whole(height, width).sample(values, turn)
    for rank in range(degree):
        columns = slice(rank * size, (rank + 1) * size)
        here, found = part_of(rows, height, width, columns, rows).sample(values[:, columns], turn)
        assert len(here) > 0
        assert torch.equal(found, rows_of(sent, width)[here].flatten())


@pytest.mark.parametrize(("height", "width"), [(128, 128), (384, 1024), (1024, 3072), (2048, 11008)])
def test_each_of_eight_shares_of_columns_is_seen_at_each_look(height, width):
    rows, size = torch.arange(height), width // 8
    shares = [part_of(rows, height, width, slice(i * size, (i + 1) * size), rows) for i in range(8)]
    assert all(len(share.look(turn)[1]) for share in shares for turn in [*range(64), 511, 1003])


def test_rows_of_a_fused_parameter_are_found_where_they_lie():
    """Such as keys: rows 2, 3 of each four of the parameter, on the second of two ranks, which has its rows 8 to 15."""
    values = matrix(8, 64)
    fused = torch.zeros(8, 64, dtype=torch.int64)
    local = torch.tensor([2, 3, 6, 7])
    fused[local] = values[4:]
    rows, found = part_of(torch.arange(4, 8), 8, 64, slice(0, 64), local).sample(fused, 5)
    assert len(rows) == 1
    assert torch.equal(found, rows_of(whole(8, 64).sample(values, 5)[1], 64)[rows].flatten())


def test_a_bias_within_a_fused_one_is_found_where_it_lies():
    fused, local = torch.arange(12), torch.tensor([2, 3, 6, 7])
    rows, found = part_of(torch.arange(4), 4, 1, slice(0, 1), local).sample(fused, 5)
    assert rows is None
    assert found.flatten().tolist() == [2, 3, 6, 7]
    first = part_of(torch.arange(4), 4, 1, slice(0, 1), torch.arange(4))
    for owned in (fused, fused[:4]):
        assert first.sample(owned, 5)[1].flatten().tolist() == [0, 1, 2, 3]


def test_a_rank_without_a_row_has_no_sample():
    none = torch.arange(0)
    rows, found = part_of(none, 5, 64, slice(0, 64), none).sample(torch.zeros(0, 64), 3)
    assert (len(rows), len(found)) == (0, 0)


def test_columns_are_spread():
    assert sampled_columns(32, 1) == slice(1, 32, 4)
