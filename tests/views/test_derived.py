"""Tensors derived from ranges of others: slices of the view equal slices by torch."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unified_ckpt as uc
from unified_ckpt.engine.source.view import SourceView
from unified_ckpt.views.derived import ElementRange, RangesTensor, derive

QUICK = uc.SaveOptions(fsync=False)
DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.bool]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four tensors of 24 elements in each dtype."""
    draw = torch.Generator().manual_seed(0)
    tensors = {
        f"{str(dtype).removeprefix('torch.')}/{i}": torch.randint(
            0, 100, (4, 6), generator=draw
        ).to(dtype)
        for dtype in DTYPES
        for i in range(4)
    }
    path = tmp_path_factory.mktemp("recut") / "c"
    uc.save(path, model=tensors, options=QUICK)
    return path


@settings(max_examples=40)
@given(
    dtype=st.sampled_from(DTYPES),
    pieces=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 24), st.integers(0, 24)).map(
            lambda p: (p[0], min(p[1:]), max(p[1:]))
        ),
        min_size=1,
        max_size=6,
    ),
    cut=st.data(),
)
def test_slices_of_tensors_derived_from_ranges(
    folder: Path, dtype: torch.dtype, pieces: list[tuple[int, int, int]], cut: st.DataObject
) -> None:
    kind = str(dtype).removeprefix("torch.")
    count = sum(stop - start for _, start, stop in pieces)
    width = cut.draw(st.sampled_from([n for n in (1, 2, 3, 5) if count % n == 0]))
    ranges_tensor = RangesTensor(
        (count // width, width),
        tuple(ElementRange(f"{kind}/{i}", start, stop - start) for i, start, stop in pieces),
    )
    with uc.open(folder) as opened:
        needed = torch.cat(
            [opened["model"][f"{kind}/{i}"][...].flatten()[start:stop] for i, start, stop in pieces]
        ).reshape(ranges_tensor.shape)
        view = SourceView(derive(opened.source, {"made": ranges_tensor}, parts=["model"]))
        assert torch.equal(view["model"]["made"][...], needed)
        low, high = sorted(
            cut.draw(
                st.tuples(
                    st.integers(0, ranges_tensor.shape[0]), st.integers(0, ranges_tensor.shape[0])
                )
            )
        )
        first_column, stop_column = sorted(
            cut.draw(st.tuples(st.integers(0, width), st.integers(0, width)))
        )
        assert torch.equal(
            view["model"]["made"][low:high, first_column:stop_column],
            needed[low:high, first_column:stop_column],
        )
        target = torch.zeros_like(needed)
        uc.load(view, model={"made": target}, strict=False)
        assert torch.equal(target, needed)


def test_names_are_derivable_and_unused_tensors(folder: Path) -> None:
    tensors = {
        "joined": RangesTensor(
            (8, 6), (ElementRange("float32/0", 0, 24), ElementRange("float32/1", 0, 24))
        ),
        "not there": RangesTensor(
            (2,), (ElementRange("float32/9", 0, 1), ElementRange("float32/2", 0, 1))
        ),
    }
    with uc.open(folder) as opened:
        view = SourceView(derive(opened.source, tensors, parts=["model", "master_weights"]))
        assert set(view["model"]) == {"joined", *opened["model"]} - {"float32/0", "float32/1"}
        with pytest.raises(KeyError, match="not there"):
            view["model"]["not there"]
        with pytest.raises(uc.NotFoundError, match="float32/0: does not exist in the checkpoint"):
            view.source.read_into(("model", "float32/0"), 0, memoryview(bytearray(4)))


def test_whole_tensors_keep_their_digests(folder: Path) -> None:
    tensors = {
        "renamed": RangesTensor((24,), (ElementRange("float32/0", 0, 24),)),
        "half": RangesTensor((12,), (ElementRange("float32/1", 12, 12),)),
    }
    with uc.open(folder) as opened:
        view = derive(opened.source, tensors, parts=["model"])
        keys = [("model", "renamed"), ("model", "half"), ("model", "uint8/0")]
        digests = view.block_digests(keys)
        stored = opened.source.block_digests([("model", "float32/0"), ("model", "uint8/0")])
    assert [digests[key] for key in keys] == [
        stored["model", "float32/0"],
        None,
        stored["model", "uint8/0"],
    ]


def test_ranges_that_do_not_fit_are_refused(folder: Path) -> None:
    mixed = RangesTensor((48,), (ElementRange("float32/0", 0, 24), ElementRange("uint8/0", 0, 24)))
    long = RangesTensor((30,), (ElementRange("float32/0", 0, 30),))
    with uc.open(folder) as opened:
        view = SourceView(derive(opened.source, {"mixed": mixed, "long": long}, parts=["model"]))
        with pytest.raises(
            uc.FormatError, match="mixed: got operands of dtypes F32, U8, expected one"
        ):
            view["model"]["mixed"]
        view = SourceView(derive(opened.source, {"long": long}, parts=["model"]))
        target = torch.zeros(prod(long.shape))
        with pytest.raises(
            uc.FormatError, match="model:long: float32/0: got 24 elements, expected at least 30"
        ):
            uc.load(view, model={"long": target}, strict=False)
        assert not target.any()
