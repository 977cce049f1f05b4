"""The location table returns what its folder does, and needs few bytes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Collection, Mapping, Sequence
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.cluster import locations
from unified_ckpt.engine.cluster.locations import LocationTable
from unified_ckpt.engine.source.protocol import Location, Locations
from unified_ckpt.errors import IntegrityError
from unified_ckpt.runtime.storage.protocol import Reader

STORAGE = cast("Reader", object())
Tensor = tuple[str, int, list[int] | None]  # file, first byte, digests
TENSORS = st.dictionaries(
    st.tuples(st.text(max_size=3), st.text(max_size=3)),
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.integers(0, 2**62),
        st.none() | st.lists(st.integers(0, 2**64 - 1), max_size=3),
    ),
    min_size=1,
)


class CountingFolder:
    """A folder that counts requests for headers and digests. Its headers lack the `bad` tensors."""

    def __init__(self, tensors: Mapping[Key, Tensor], *, bad: Collection[Key] = ()) -> None:
        self.storage, self._tensors, self._bad = STORAGE, tensors, bad
        self.requests = 0

    def file_of(self, part: str, name: str) -> str:
        return self._tensors[part, name][0]

    def locations(self, keys: Collection[Key]) -> Locations:
        self.requests += 1
        if any(key in self._bad for key in keys):
            raise IntegrityError("has no such tensor")
        return Locations(self.storage, {key: Location(*self._tensors[key][:2]) for key in keys})

    def block_digests(self, keys: Collection[Key]) -> Mapping[Key, Sequence[int] | None]:
        self.requests += 1
        return {key: self._tensors[key][2] for key in keys}


def check(tensors: Mapping[Key, Tensor]) -> None:
    folder, table = CountingFolder(tensors), LocationTable(STORAGE, list(tensors))
    table.load_digests(folder, list(tensors))
    for key, (file, start, digests) in tensors.items():
        assert (
            table.location(key) or table.load_locations(folder, lambda: list(tensors), key)
        ) == Location(file, start)
        actual = table.digests(key)
        assert (actual is None) == (digests is None)
        assert actual is None or actual.tolist() == digests
    assert folder.requests == 1 + len({file for file, _, _ in tensors.values()}), "each file once"


@given(TENSORS)
def test_location_table_matches_the_folder(tensors: dict[Key, Tensor]) -> None:
    check(tensors)


def test_colliding_hashes_are_salted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one-byte hashes, twenty tensors collide under most salts."""
    monkeypatch.setattr(locations, "_HASH_NBYTES", 1)
    check({("model", f"w{i}"): ("a", i, [i]) for i in range(20)})


def test_missing_tensor_does_not_affect_others() -> None:
    tensors: dict[Key, Tensor] = {("model", name): ("a", 8, None) for name in "xyz"}
    folder, table = (
        CountingFolder(tensors, bad=[("model", "y")]),
        LocationTable(STORAGE, list(tensors)),
    )
    assert table.load_locations(folder, lambda: list(tensors), ("model", "x")) == Location("a", 8)
    with pytest.raises(IntegrityError, match="has no such tensor"):
        table.load_locations(folder, lambda: list(tensors), ("model", "y"))
    assert table.location(("model", "y")) is None
    assert table.load_locations(folder, lambda: list(tensors), ("model", "z")) == Location("a", 8)
    with pytest.raises(KeyError, match="absent"):
        table.location(("model", "absent"))


def test_location_table_memory_per_tensor() -> None:
    """One kilobyte per tensor of each of 2,048 folders would be 15 GB per rank."""
    count = 4000
    tensors: dict[Key, Tensor] = {
        ("model", f"model.layers.{i}.mlp.weight@0:1/8"): ("a", 64 * i, [i]) for i in range(count)
    }
    folder = CountingFolder(tensors)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        table = LocationTable(STORAGE, list(tensors))
        table.load_digests(folder, list(tensors))
        table.load_locations(folder, lambda: list(tensors), next(iter(tensors)))
        table_nbytes = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert table_nbytes / count < 64
