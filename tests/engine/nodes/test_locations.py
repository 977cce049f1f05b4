"""The location table gives the answers of its folder in few bytes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Collection, Mapping, Sequence
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.nodes import locations
from unified_ckpt.engine.nodes.locations import LocationTable
from unified_ckpt.engine.source.protocol import Catalog, Location
from unified_ckpt.errors import IntegrityError
from unified_ckpt.runtime.storage.storage import Reader

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


class Shelf:
    """A folder that counts how often its headers and digests are asked for. `bad`: tensors that its
    headers lack.
    """

    def __init__(self, tensors: Mapping[Key, Tensor], *, bad: Collection[Key] = ()) -> None:
        self.storage, self._tensors, self._bad = STORAGE, tensors, bad
        self.asked = 0

    def file_of(self, part: str, name: str) -> str:
        return self._tensors[part, name][0]

    def catalog(self, wanted: Collection[Key]) -> Catalog:
        self.asked += 1
        if any(key in self._bad for key in wanted):
            raise IntegrityError("has no such tensor")
        return Catalog(self.storage, {key: Location(*self._tensors[key][:2]) for key in wanted})

    def block_digests(self, wanted: Collection[Key]) -> Mapping[Key, Sequence[int] | None]:
        self.asked += 1
        return {key: self._tensors[key][2] for key in wanted}


def check(tensors: Mapping[Key, Tensor]) -> None:
    folder, found = Shelf(tensors), LocationTable(STORAGE, list(tensors))
    found.load_digests(folder, list(tensors))
    for key, (file, start, words) in tensors.items():
        assert (
            found.location(key) or found.load_locations(folder, lambda: list(tensors), key)
        ) == Location(file, start)
        told = found.digests(key)
        assert (told is None) == (words is None)
        assert told is None or told.tolist() == words
    assert folder.asked == 1 + len({file for file, _, _ in tensors.values()}), "each file once"


@given(TENSORS)
def test_answers_match_the_folder(tensors: dict[Key, Tensor]) -> None:
    check(tensors)


def test_colliding_hashes_are_salted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a byte: of twenty tensors two share one by nearly every salt but some."""
    monkeypatch.setattr(locations, "_HASH_NBYTES", 1)
    check({("model", f"w{i}"): ("a", i, [i]) for i in range(20)})


def test_missing_tensor_does_not_affect_others() -> None:
    tensors: dict[Key, Tensor] = {("model", name): ("a", 8, None) for name in "xyz"}
    folder, found = Shelf(tensors, bad=[("model", "y")]), LocationTable(STORAGE, list(tensors))
    assert found.load_locations(folder, lambda: list(tensors), ("model", "x")) == Location("a", 8)
    with pytest.raises(IntegrityError, match="has no such tensor"):
        found.load_locations(folder, lambda: list(tensors), ("model", "y"))
    assert found.location(("model", "y")) is None


def test_location_takes_tens_of_bytes() -> None:
    """A kilobyte for each tensor of each of 2,048 folders is 15 GB a rank."""
    count = 4000
    tensors: dict[Key, Tensor] = {
        ("model", f"model.layers.{i}.mlp.weight@0:1/8"): ("a", 64 * i, [i]) for i in range(count)
    }
    folder = Shelf(tensors)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        found = LocationTable(STORAGE, list(tensors))
        found.load_digests(folder, list(tensors))
        found.load_locations(folder, lambda: list(tensors), next(iter(tensors)))
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held / count < 64
