"""Declared boxes: each byte has one writer, and every way to be wrong is an error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.core.box_cases import SHAPES, declarations, declared, tables_of, times_covered
from unified_ckpt.core.intervals import Interval
from unified_ckpt.core.planning.declared_boxes.plan import BoxPlan, plan_boxes
from unified_ckpt.core.planning.declared_boxes.shares import share_extents
from unified_ckpt.core.planning.exchange import Extent
from unified_ckpt.core.sharding.box_tables import box_order
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import Key, TensorDecl
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.errors import LayoutError, MismatchError

SPEC = TensorSpec("F32", (8, 4))


def shares_of(plan: BoxPlan, table: str, rank: int) -> dict[int, Interval]:
    """What rank 0 sends to a rank: its share of each class, also of those it does not share."""
    shares = {}
    for number in {number for number, _ in plan.classes_of[table]}:
        ranks, ends = plan.shares[number].ranks, plan.shares[number].ends
        index = ranks.index(rank)
        shares[number] = ends[index - 1] if index else 0, ends[index]
    return shares


def written(
    by_rank: Sequence[Sequence[TensorDecl]],
) -> Iterator[tuple[int, TensorDecl, Extent]]:
    """What each rank writes."""
    tables, ranks = tables_of(by_rank)
    plan = plan_boxes(tables, ranks)
    for table, of_table in ranks.items():
        for rank in of_table:
            shares, decls = shares_of(plan, table, rank), by_rank[rank]
            for extent in share_extents(decls, plan.classes_of[table], shares):
                yield rank, decls[extent.decl_index], extent


@given(st.integers(1, 5).flatmap(declarations))
def test_each_byte_has_one_writer(by_rank: list[list[TensorDecl]]) -> None:
    """Who reads it from where its own box has it."""
    writers: dict[Key, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}
    locals_: dict[TensorDecl, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}
    for decl in {decl for decls in by_rank for decl in decls}:
        box, numbers = decl.sharding.box, np.arange(decl.spec.nbytes)
        assert box is not None
        writers[decl.key] = np.zeros(decl.spec.nbytes, np.int64)
        locals_[decl] = numbers.reshape(*decl.spec.shape, -1)[box.slices].reshape(-1)
    for _, decl, extent in written(by_rank):
        writers[decl.key][extent.start : extent.stop] += 1
        nbytes = extent.stop - extent.start
        expected = locals_[decl][extent.local_offset : extent.local_offset + nbytes]
        assert (expected == np.arange(extent.start, extent.stop)).all()
    for key, counts in writers.items():
        assert (counts == 1).all(), key


@st.composite
def changed(draw: st.DrawFn) -> list[list[TensorDecl]]:
    """Declarations of which one box is another one, or missing on some ranks, or doubled."""
    by_rank = draw(declarations(3))
    rank = draw(st.sampled_from([rank for rank, decls in enumerate(by_rank) if decls]))
    decl = draw(st.sampled_from(by_rank[rank]))
    box = decl.sharding.box
    assert box is not None
    offsets = [draw(st.integers(0, n - 1)) for n in decl.spec.shape]
    shape = [draw(st.integers(1, n - low)) for n, low in zip(decl.spec.shape, offsets, strict=True)]
    (other,) = declared(decl.fqn, decl.spec, [Box(tuple(offsets), tuple(shape))])
    replaced: list[TensorDecl] = draw(st.sampled_from([[other], [], [decl, other]]))
    by_rank[rank] = [*(each for each in by_rank[rank] if each != decl), *replaced]
    return [sorted(decls, key=box_order) for decls in by_rank]


@given(changed())
def test_only_tilings_are_planned(by_rank: list[list[TensorDecl]]) -> None:
    """Counted in numpy: distinct boxes have each element once, and no rank has one twice."""
    boxes: dict[Key, set[Box]] = {}
    specs: dict[Key, TensorSpec] = {}
    for decl in (decl for decls in by_rank for decl in decls):
        assert decl.sharding.box is not None
        boxes.setdefault(decl.key, set()).add(decl.sharding.box)
        specs[decl.key] = decl.spec
    is_right = all(len(set(decls)) == len(decls) for decls in by_rank) and all(
        (times_covered(specs[key].shape, of_key) == 1).all() for key, of_key in boxes.items()
    )
    if is_right:
        nbytes = sum(extent.stop - extent.start for _, _, extent in written(by_rank))
        assert nbytes == sum(spec.nbytes for spec in specs.values())
    else:
        with pytest.raises(LayoutError, match="boxes that ranks declare are not whole tensors"):
            list(written(by_rank))


def rows(low: int, high: int) -> Box:
    return Box((low, 0), (high - low, 4))


Held = Sequence[Sequence[Box]]


@pytest.mark.parametrize(
    ("held", "text"),
    [
        ([[rows(0, 3)], [rows(3, 8)], [rows(3, 8)]], None),
        ([[rows(0, 3)], [rows(4, 8)]], r"no rank declares \[3:4, 0:4\], rank\(s\) 0-1 declare the"),
        ([[rows(0, 3)], [rows(3, 7)]], r"no rank declares \[7:8, 0:4\]"),
        ([[rows(1, 3)], [rows(3, 8)]], r"no rank declares \[0:1, 0:4\]"),
        ([[], [Box((0, 0), (0, 0))]], r"no rank declares any of \[0:8, 0:4\]"),
        (
            [[rows(0, 4)], [rows(3, 8)], [rows(3, 8)]],
            r"\[0:4, 0:4\] of rank\(s\) 0 and \[3:8, 0:4\] of rank\(s\) 1-2 overlap",
        ),
        (
            [[rows(0, 4)], [rows(4, 8)], [rows(4, 6), rows(6, 8)]],
            r"\[4:6, 0:4\] of rank\(s\) 2 and \[4:8, 0:4\] of rank\(s\) 1 overlap",
        ),
        (
            [[rows(0, 4)], [rows(4, 8), rows(4, 8)]],
            r"rank\(s\) 1 declare \[4:8, 0:4\] twice",
        ),
        (  # as many elements as the tensor: one column twice, another one never
            [[Box((0, 0), (8, 2))], [Box((0, 1), (8, 2))]],
            r"\[0:8, 0:2\] of rank\(s\) 0 and \[0:8, 1:3\] of rank\(s\) 1 overlap",
        ),
    ],
)
def test_errors_name_ranks_and_boxes(held: Held, text: str | None) -> None:
    by_rank = [declared("w", SPEC, boxes) for boxes in held]
    if text is None:
        assert list(written(by_rank))
        return
    with pytest.raises(LayoutError, match=rf"model:w, of shape \(8, 4\): {text}|model:w: {text}"):
        list(written(by_rank))


@pytest.mark.parametrize("spec", [TensorSpec("F32", (9, 4)), TensorSpec("BF16", (8, 4))])
def test_specs_of_one_tensor_are_equal(spec: TensorSpec) -> None:
    by_rank = [declared("w", SPEC, [rows(0, 3)]), declared("w", spec, [rows(3, 8)])]
    with pytest.raises(MismatchError, match=r"F32 \(8, 4\) on rank 0 and .* on rank 1"):
        list(written(by_rank))


def test_each_box_has_one_writer() -> None:
    """Many are spread over the replicas. What one rank alone holds counts, too."""
    spec = TensorSpec("U8", (1 << 16,))
    whole = Box((0,), spec.shape)
    shared = [decl for n in range(64) for decl in declared(f"w{n:02}", spec, [whole])]
    alone = [decl for n in range(16) for decl in declared(f"v{n:02}", spec, [whole])]
    by_rank = [sorted(shared + (alone if rank == 2 else []), key=box_order) for rank in range(5)]
    counts = dict.fromkeys(range(5), 0)
    for rank, _, extent in written(by_rank):
        counts[rank] += 1
        assert (extent.start, extent.stop) == (0, spec.nbytes)
    assert counts == dict.fromkeys(range(5), 16)


@given(shape=SHAPES, world=st.integers(1, 4))
def test_ranks_of_other_tensors_are_other_groups(shape: tuple[int, ...], world: int) -> None:
    whole = Box((0,) * len(shape), shape)
    spec = TensorSpec("F32", shape)
    by_rank = [declared(f"{rank}", spec, [whole]) for rank in range(world)]
    tables, ranks = tables_of(by_rank)
    plan = plan_boxes(tables, ranks)
    assert sorted(group.ranks for group in plan.groups) == [(rank,) for rank in range(world)]
    for table, number in plan.group_of.items():
        assert plan.groups[number].tensors == tables[table].names.tensors
