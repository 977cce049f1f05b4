from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified_ckpt.core.planning.split_files import split_files

SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=12)
BOUND = st.integers(1, 60)


def totals(sizes: list[int], files: list[range]) -> list[int]:
    return [sum(sizes[i] for i in file) for file in files]


def within(sizes: list[int], files: list[range], bound: int) -> bool:
    return all(
        len(file) == 1 or total <= bound
        for file, total in zip(files, totals(sizes, files), strict=True)
    )


def splits(sizes: list[int], count: int) -> list[list[range]]:
    """Return every division of the tensors, in order, into `count` non-empty files."""
    borders = [(0, *cut, len(sizes)) for cut in combinations(range(1, len(sizes)), count - 1)]
    return [[range(a, b) for a, b in pairwise(cut)] for cut in borders]


@given(SIZES, BOUND)
def test_each_tensor_is_in_one_file_within_the_limit(sizes: list[int], bound: int) -> None:
    files = split_files(sizes, max_file_bytes=bound)
    assert [i for file in files for i in file] == list(range(len(sizes)))
    assert all(len(file) for file in files)
    for file, total in zip(files, totals(sizes, files), strict=True):
        assert total <= bound or len(file) == 1
    assert files == split_files(list(sizes), max_file_bytes=bound)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), BOUND)
def test_files_are_as_few_and_as_even_as_the_order_allows(sizes: list[int], bound: int) -> None:
    files = split_files(sizes, max_file_bytes=bound)
    assert not any(
        within(sizes, f, bound) for count in range(1, len(files)) for f in splits(sizes, count)
    )
    best = min(max(totals(sizes, f)) for f in splits(sizes, len(files)) if within(sizes, f, bound))
    assert max(totals(sizes, files)) == best


def test_no_tensors_no_files() -> None:
    assert split_files([], max_file_bytes=10) == []


@pytest.mark.parametrize("tensors", [100_000])
def test_many_tensors(tensors: int) -> None:
    sizes = [(i * 7919) % 1_000_003 for i in range(tensors)]
    files = split_files(sizes, max_file_bytes=5_000_000_000)
    count, filled = 1, 0
    for size in sizes:
        count, filled = (
            (count, filled + size) if filled + size <= 5_000_000_000 else (count + 1, size)
        )
    assert len(files) == count
    assert max(totals(sizes, files)) - min(totals(sizes, files)) < 20 * 1_000_003
