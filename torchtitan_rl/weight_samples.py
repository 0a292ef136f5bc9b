"""Which elements of a weight are looked at when a copy of it is proven: all rows of a few columns that move on at each look."""

import functools

COLUMNS = 8
"""Of each matrix at a time, spread evenly, so that every tensor-parallel share has some. After width / 8 looks all were seen."""


@functools.lru_cache(4096)
def sampled(width: int, turn: int, begin: int = 0, end: int | None = None) -> tuple[slice, slice]:
    """The sampled columns within [begin, end) of a matrix: where they are, counted from `begin`, and which of all they are.

    Example: of 32 columns at turn 1 these are 1, 5, 9, ... 29; within the second half (slice(1, 16, 4), slice(4, 8)).
    """
    end = width if end is None else end
    stride = max(1, width // COLUMNS)
    first = turn % stride
    before = max(0, -(-(begin - first) // stride))
    start = first + before * stride - begin
    inside = range(start, end - begin, stride)
    return slice(start, end - begin, stride), slice(before, before + len(inside))
