"""Proves that the boxes that ranks declare are whole tensors, and divides them among their holders.

How bytes could be lost, each with a test:
- No rank declares some elements: the file would have zeros there.
- Boxes overlap: two ranks would write one byte. Equal boxes of several ranks are replicas, and one
  rank writes each of their bytes.
- Two ranks compute a border between their shares differently: only rank 0 divides, and both round
  the same number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from unified_ckpt.core.planning.declared_boxes.shares import ClassRun
from unified_ckpt.core.planning.declared_boxes.tilings import (
    box_volumes,
    describe_box,
    tiling_defect,
)
from unified_ckpt.core.planning.io_assignment import Shares, divide
from unified_ckpt.core.sharding.box_tables import BoxNames, BoxTable, Numbers, box_at
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.core.text import first_items, format_list, format_ranks, raise_if_any
from unified_ckpt.errors import LayoutError, MismatchError


@dataclass(frozen=True, slots=True)
class BoxGroup:
    """Tensors, sorted by key, and the ranks, ascending, that hold boxes of them.

    No rank of another group has a box of one of them.
    """

    tensors: tuple[tuple[Key, TensorSpec], ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BoxPlan:
    """The boxes of all ranks, on rank 0.

    Boxes that the same ranks hold are a class; `shares` divides the bytes of each. By table:
    `groups`, the index of its group, and `classes` of its boxes.
    """

    groups: Sequence[BoxGroup] = ()
    shares: Sequence[Shares] = ()
    group_of: Mapping[str, int] = field(default_factory=dict)
    classes_of: Mapping[str, Sequence[ClassRun]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Cuts:
    """The tensors of all tables. Those that all ranks cut alike have one cut.

    `of_names`: by id of the names, pairs of a set and a cut, ascending. `numbers`: the cut of each
    tensor. `members`: the tensors of each cut, which have one shape.
    """

    specs: Mapping[Key, TensorSpec]
    numbers: Mapping[Key, int]
    members: Sequence[Sequence[Key]]
    of_names: Mapping[int, Sequence[tuple[int, int]]]

    def shape(self, cut: int) -> tuple[int, ...]:
        """Return the shape of the tensors of a cut."""
        return self.specs[self.members[cut][0]].shape

    def element_nbytes(self) -> Numbers:
        """Return the bytes of an element of all tensors, by cut."""
        sizes = (sum(itemsize(self.specs[key].dtype) for key in keys) for keys in self.members)
        return np.fromiter(sizes, np.int64, len(self.members))


@dataclass(frozen=True, slots=True)
class _Boxes:
    """The boxes of all tables, sorted by cut and corners; equal ones are one.

    `tables`: the indices of the tables that declare box i are those from `starts[i]` on.
    `order`: the position of each entry of `tables` in the tables one after the other.
    """

    cuts: Numbers
    corners: Numbers
    starts: Numbers
    tables: Numbers
    order: Numbers

    def of_cut(self, cut: int) -> slice:
        """Return the boxes of a cut."""
        first, stop = np.searchsorted(self.cuts, (cut, cut + 1)).tolist()
        return slice(first, stop)

    def tables_of(self, index: int) -> list[int]:
        """Return the indices of the tables that declare a box."""
        return list(self.tables[self.starts[index] : self.starts[index + 1]].tolist())


def plan_boxes(
    tables: Mapping[str, BoxTable], ranks_by_table: Mapping[str, Sequence[int]]
) -> BoxPlan:
    """Return which rank writes which boxes. `ranks_by_table`: the ranks of each table, ascending.

    LayoutError or MismatchError, naming ranks, unless the boxes of each tensor are that tensor.
    """
    if not tables:
        return BoxPlan()
    table_ids, cuts = list(tables), _find_cuts(tables, ranks_by_table)
    ranks = [ranks_by_table[table_id] for table_id in table_ids]
    boxes = _sort_boxes(list(tables.values()), cuts)
    nbytes = _checked_volumes(cuts, boxes, ranks) * cuts.element_nbytes()[boxes.cuts]
    class_of, class_tables = _find_classes(boxes)
    class_nbytes = np.zeros(len(class_tables), np.int64)
    np.add.at(class_nbytes, class_of, nbytes)
    class_ranks = [
        list(ranks[members[0]])
        if len(members) == 1
        else sorted(rank for table in members for rank in ranks[table])
        for members in class_tables
    ]
    by_size = sorted(range(len(class_ranks)), key=lambda number: len(class_ranks[number]))
    shares = divide(
        {number: (class_ranks[number], int(class_nbytes[number])) for number in by_size},
        {rank: 0 for of_table in ranks for rank in of_table},
        overlapping=len(class_ranks) > 1,
    )
    labels = _find_groups(boxes, len(tables))
    groups = _groups(labels, cuts, boxes, ranks)
    group_numbers = {label: number for number, label in enumerate(groups)}
    by_position = np.empty(len(boxes.order), np.int64)
    by_position[boxes.order] = np.repeat(class_of, np.diff(boxes.starts))
    table_sizes = np.bincount(boxes.tables, minlength=len(tables))
    by_table = np.split(by_position, np.cumsum(table_sizes)[:-1])
    classes_of = {
        table_id: _class_runs(table, cuts, classes)
        for (table_id, table), classes in zip(tables.items(), by_table, strict=True)
    }
    return BoxPlan(
        list(groups.values()),
        [shares[number] for number in range(len(class_ranks))],
        {
            table_id: group_numbers[label]
            for table_id, label in zip(table_ids, labels.tolist(), strict=True)
            if label in groups
        },
        classes_of,
    )


def _find_cuts(
    tables: Mapping[str, BoxTable], ranks_by_table: Mapping[str, Sequence[int]]
) -> _Cuts:
    """Find the tensors that all ranks cut alike. MismatchError if ranks disagree on a spec."""
    first_by_key: dict[Key, tuple[TensorSpec, str]] = {}
    problems = []
    cut_by_key: dict[Key, int] = {}
    distinct_names: dict[int, BoxNames] = {}
    count = 1
    for table_id, table in tables.items():
        names = table.names
        if id(names) in distinct_names:
            continue
        distinct_names[id(names)] = names
        refined: dict[tuple[int, int], int] = {}
        for (key, spec), number in zip(names.tensors, names.sets, strict=True):
            first, first_table = first_by_key.setdefault(key, (spec, table_id))
            if first != spec:
                rank, other = ranks_by_table[first_table][0], ranks_by_table[table_id][0]
                problems.append(
                    f"{':'.join(key)}: got {first.dtype} {first.shape} on rank {rank} and "
                    f"{spec.dtype} {spec.shape} on rank {other}, expected one global shape and "
                    "dtype"
                )
            cut = refined.setdefault((cut_by_key.get(key, 0), number), count)
            count += cut == count
            cut_by_key[key] = cut
    if problems:
        raise MismatchError(
            format_list("ranks disagree on shapes or dtypes", problems), wrong=problems
        )
    members: dict[int, list[Key]] = {}
    for key, cut in cut_by_key.items():
        members.setdefault(cut, []).append(key)
    numbers = {key: cut for cut, keys in enumerate(members.values()) for key in keys}
    of_names = {
        names_id: sorted(
            {
                (number, numbers[key])
                for (key, _), number in zip(names.tensors, names.sets, strict=True)
            }
        )
        for names_id, names in distinct_names.items()
    }
    specs = {key: spec for key, (spec, _) in first_by_key.items()}
    return _Cuts(specs, numbers, list(members.values()), of_names)


def _rows(table: BoxTable, pairs: Sequence[tuple[int, int]]) -> tuple[Numbers, Numbers]:
    """Return the cut and the row in `corners` of each box of a table; a set may be of several cuts.

    By pair, in its order.
    """
    sets, cuts = np.array(pairs, np.int64).reshape(-1, 2).T
    counts = table.counts[sets]
    if len(pairs) == len(table.counts):
        return np.repeat(cuts, counts), np.arange(len(table.corners))
    starts = (np.cumsum(table.counts) - table.counts)[sets]
    rows = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - starts, counts)
    return np.repeat(cuts, counts), rows


def _sort_boxes(tables: Sequence[BoxTable], cuts: _Cuts) -> _Boxes:
    rows = [_rows(table, cuts.of_names[id(table.names)]) for table in tables]
    cut_of = np.concatenate([cut for cut, _ in rows])
    corners = np.concatenate(
        [table.corners[index] for table, (_, index) in zip(tables, rows, strict=True)]
    )
    table_of = np.repeat(np.arange(len(tables)), [len(cut) for cut, _ in rows])
    order = np.lexsort((table_of, corners[:, 1], corners[:, 0], cut_of))
    cut_of, corners = cut_of[order], corners[order]
    is_new = np.ones(len(order), bool)
    is_new[1:] = (cut_of[1:] != cut_of[:-1]) | (corners[1:] != corners[:-1]).any(axis=1)
    starts = np.flatnonzero(is_new)
    ends = np.append(starts, len(order))
    return _Boxes(cut_of[starts], corners[starts], ends, table_of[order], order)


def _checked_volumes(cuts: _Cuts, boxes: _Boxes, ranks: Sequence[Sequence[int]]) -> Numbers:
    """Return the elements of each box. LayoutError unless those of a cut tile its tensors."""
    volumes, problems = np.zeros(len(boxes.cuts), np.int64), list[str]()
    for cut, keys in enumerate(cuts.members):
        span, shape = boxes.of_cut(cut), cuts.shape(cut)
        corners = boxes.corners[span]
        of_cut, tiles = box_volumes(corners, shape)
        volumes[span] = of_cut
        if not tiles:

            def holders(index: int, first: int = span.start) -> list[int]:
                tables = boxes.tables_of(first + index)
                return sorted(rank for table in tables for rank in ranks[table])

            names = first_items([":".join(key) for key in sorted(keys)], 2)
            problems.append(f"{names}, of shape {shape}: {tiling_defect(corners, shape, holders)}")
    problems += _declared_twice(cuts, boxes, ranks)
    raise_if_any(LayoutError, "boxes that ranks declare are not whole tensors", problems)
    return volumes


def _declared_twice(cuts: _Cuts, boxes: _Boxes, ranks: Sequence[Sequence[int]]) -> Iterator[str]:
    """Describe boxes that one rank declares twice: it would write them twice."""
    repeated = boxes.tables[1:] == boxes.tables[:-1]
    repeated[boxes.starts[1:-1] - 1] = False  # the next box
    for position in np.flatnonzero(repeated).tolist():
        index = int(np.searchsorted(boxes.starts, position, side="right")) - 1
        cut, table = int(boxes.cuts[index]), int(boxes.tables[position])
        first, last = boxes.corners[index].tolist()
        box = box_at(first, last, cuts.shape(cut))
        yield (
            f"{':'.join(cuts.members[cut][0])}: rank(s) {format_ranks(ranks[table])} declare "
            f"{describe_box(box)} twice; declare it once"
        )


def _find_classes(boxes: _Boxes) -> tuple[Numbers, list[tuple[int, ...]]]:
    """Return the class of each box, and the tables that declare the boxes of each class."""
    sizes = np.diff(boxes.starts)
    classes = np.zeros(len(sizes), np.int64)
    numbers: dict[bytes, int] = {}
    of_table, inverse = np.unique(boxes.tables[boxes.starts[:-1]][sizes == 1], return_inverse=True)
    classes[sizes == 1] = inverse
    members: list[tuple[int, ...]] = [(table,) for table in of_table.tolist()]
    for index in np.flatnonzero(sizes > 1).tolist():
        tables = boxes.tables[boxes.starts[index] : boxes.starts[index + 1]]
        number = numbers.setdefault(tables.tobytes(), len(members))
        if number == len(members):
            members.append(tuple(tables.tolist()))
        classes[index] = number
    return classes, members


def _class_runs(table: BoxTable, cuts: _Cuts, classes: Numbers) -> list[ClassRun]:
    """Return the classes of a table's boxes in `box_order`. `classes`: in the order of `_rows`."""
    names = table.names
    if len(classes) and (classes == classes[0]).all():
        return [(int(classes[0]), int(table.counts[list(names.sets)].sum()))]
    pairs = cuts.of_names[id(names)]
    counts = table.counts[[number for number, _ in pairs]]
    by_pair = dict(zip(pairs, np.split(classes, np.cumsum(counts)[:-1]), strict=True))
    in_order = (
        number
        for (key, _), of_set in zip(names.tensors, names.sets, strict=True)
        for number in by_pair[of_set, cuts.numbers[key]].tolist()
    )
    return [(number, sum(1 for _ in run)) for number, run in groupby(in_order)]


def _find_groups(boxes: _Boxes, table_count: int) -> Numbers:
    """Return the group of each table: tables with boxes of one tensor are in one."""
    cut_of = np.repeat(boxes.cuts, np.diff(boxes.starts))
    starts = np.flatnonzero(np.diff(cut_of, prepend=-1))
    counts = np.diff(starts, append=len(cut_of))
    labels, previous = np.arange(table_count), np.full(table_count, -1)
    while len(starts) and (labels != previous).any():
        previous = labels.copy()
        lowest = np.minimum.reduceat(labels[boxes.tables], starts)
        np.minimum.at(labels, boxes.tables, np.repeat(lowest, counts))
        labels = labels[labels]
    return labels


def _groups(
    labels: Numbers, cuts: _Cuts, boxes: _Boxes, ranks: Sequence[Sequence[int]]
) -> dict[int, BoxGroup]:
    """Return the groups by label. A table without boxes is in none."""
    tensors: dict[int, list[tuple[Key, TensorSpec]]] = {}
    for cut, keys in enumerate(cuts.members):
        if (span := boxes.of_cut(cut)).start < span.stop:
            label = int(labels[boxes.tables_of(span.start)[0]])
            tensors.setdefault(label, []).extend((key, cuts.specs[key]) for key in keys)
    members: dict[int, list[int]] = {label: [] for label in tensors}
    for label, of_table in zip(labels.tolist(), ranks, strict=True):
        if label in members:
            members[label] += of_table
    return {
        label: BoxGroup(tuple(sorted(tensors[label])), tuple(sorted(members[label])))
        for label in sorted(tensors)
    }
