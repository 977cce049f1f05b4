from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified_ckpt.core.planning.split_files import file_limit, file_limits, split_files
from unified_ckpt.foreign.huggingface.adapters import ADAPTER_PART, adapter_part

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


GB = 1_000_000_000
PART_NBYTES = st.one_of(
    st.integers(0, 2 * GB), st.integers(0, 400 * GB), st.integers(0, 20_000 * GB)
)


@pytest.mark.parametrize(
    ("part_nbytes", "files"),
    [
        *((0, 1), (GB, 1), (GB + 1, 2), (1_024_000_000, 2), (1_024_000_001, 3)),
        *((32_768_000_000, 64), (100 * GB, 64), (320 * GB, 64), (320 * GB + 1, 65)),
        (3_240 * GB, 648),
    ],
)
def test_a_large_part_has_up_to_64_files_of_at_most_5_gb(part_nbytes: int, files: int) -> None:
    assert max(1, -(-part_nbytes // file_limit(part_nbytes))) == files


@given(PART_NBYTES, PART_NBYTES)
def test_a_larger_part_has_as_many_files_or_more(left: int, right: int) -> None:
    small, large = sorted((left, right))
    assert -(-small // file_limit(small)) <= -(-large // file_limit(large))
    assert small <= GB or file_limit(small) <= file_limit(large)
    assert file_limit(large, small + 1) == small + 1


@given(st.lists(st.integers(0, 3 * GB), min_size=1, max_size=400))
def test_tensors_of_any_size_fill_a_bounded_number_of_files(sizes: list[int]) -> None:
    """Two files that follow each other have more bytes than one may have."""
    limit = file_limit(sum(sizes))
    files = split_files(sizes, max_file_bytes=limit)
    assert [i for file in files for i in file] == list(range(len(sizes)))
    assert within(sizes, files, limit)
    assert len(files) <= (1 if sum(sizes) <= GB else 2 * max(64, sum(sizes) // (5 * GB)) + 1)


def test_limits_follow_all_tensors_of_a_part() -> None:
    sizes = [("model", GB), ("optimizer", 60 * GB), ("model", 1), ("optimizer", 68 * GB)]
    assert file_limits(sizes, max_file_bytes=None) == {"model": 512_000_000, "optimizer": 2 * GB}
    assert file_limits(sizes, max_file_bytes=7) == {"model": 7, "optimizer": 7}


@pytest.mark.parametrize("max_file_bytes", [None, 7])
def test_an_adapter_is_one_file(max_file_bytes: int | None) -> None:
    """PEFT opens no other."""
    sizes = [(part, 3 * GB) for part in (ADAPTER_PART, adapter_part("other")) for _ in range(4)]
    limits = file_limits(sizes, max_file_bytes=max_file_bytes)
    assert set(limits.values()) == {12 * GB}


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
