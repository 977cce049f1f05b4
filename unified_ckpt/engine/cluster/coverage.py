"""The cluster-wide index of one save: where each box of each tensor is, and what is missing.

Rank 0 builds it and broadcasts it. Its size grows with the number of tensors, and with nodes
only once per layout, of which a model has about a dozen. No effects.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from operator import add

import numpy as np

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.core.nodes.coverage import coverage_gaps
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec, spec_of
from unified_ckpt.core.text import format_list, format_ranks
from unified_ckpt.engine.cluster.inventory import (
    Inventory,
    Numbers,
    TensorList,
    from_columns,
    stored_key,
    to_columns,
)
from unified_ckpt.errors import IncompleteError


@dataclass(frozen=True, slots=True)
class NodeFolder:
    """A folder of the save. `node`: where it is now; `folder_id`: see `Inventory`.

    `ranks`: the ranks that wrote it; `files`: the files it has.
    """

    root: str
    node: int
    folder_id: str
    ranks: tuple[int, ...]
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ShardLayout:
    """The boxes of tensors with one shape, of which every folder holds the same boxes.

    Each row of `boxes` has a folder number, 1 for a shard or 0 for a whole tensor, then the box's
    offsets and shape.
    """

    shape: tuple[int, ...]
    boxes: Numbers  # [boxes, 2 + 2 * dims]

    def boxes_in_rows(self, low: int, high: int) -> list[tuple[Box, int, bool]]:
        """Return boxes with elements in rows [low, high) of dim 0, as (box, folder, is shard)."""
        dims, rows = len(self.shape), self.boxes
        if dims:
            rows = rows[
                (rows[:, 2] < high)
                & (rows[:, 2] + rows[:, 2 + dims] > low)
                & (rows[:, 2 + dims :] > 0).all(axis=1)
            ]
        return self._decode_rows(rows)

    def boxes_in_folder(self, folder: int) -> list[tuple[Box, int, bool]]:
        """Return the boxes in one folder, as (box, folder, is shard)."""
        return self._decode_rows(self.boxes[self.boxes[:, 0] == folder])

    def edges(self) -> list[int]:
        """Return the boundaries of boxes and tensor along dim 0, ascending."""
        if not self.shape:
            return [0, 1]
        lows, sizes = self.boxes[:, 2].tolist(), self.boxes[:, 2 + len(self.shape)].tolist()
        return sorted({0, self.shape[0], *lows, *map(add, lows, sizes)})

    def distinct_boxes(self) -> list[Box]:
        """Return the distinct boxes of all folders."""
        dims = len(self.shape)
        return [
            Box(tuple(row[:dims]), tuple(row[dims:]))
            for row in set(map(tuple, self.boxes[:, 2:].tolist()))
        ]

    def _decode_rows(self, rows: Numbers) -> list[tuple[Box, int, bool]]:
        dims = len(self.shape)
        return [
            (Box(tuple(row[2 : 2 + dims]), tuple(row[2 + dims :])), row[0], bool(row[1]))
            for row in rows.tolist()
        ]


@dataclass(frozen=True, slots=True)
class ClusterIndex:
    """The tensors of one save and the folders that hold them.

    `layout_numbers`: the layout of each tensor, as an index into `layouts`. `rank_extras`: how
    many ranks stored a `rank_extra`; `problems`: one sentence for each missing or damaged file.
    """

    folders: Sequence[NodeFolder]
    specs: Mapping[Key, TensorSpec]
    layout_numbers: Mapping[Key, int]
    layouts: Sequence[ShardLayout]
    rank_extras: int
    problems: tuple[str, ...] = ()
    save_id: str = ""

    def layout(self, key: Key) -> ShardLayout:
        """Return the layout of a tensor."""
        return self.layouts[self.layout_numbers[key]]

    def keys_in_folder(self, folder: int) -> list[Key]:
        """Return all tensors of a folder by stored part and name."""
        boxes_by_layout = [layout.boxes_in_folder(folder) for layout in self.layouts]
        return [
            stored_key(key, box, spec.shape, is_shard=is_shard)
            for key, spec in self.specs.items()
            for box, _, is_shard in boxes_by_layout[self.layout_numbers[key]]
        ]

    def encode(self) -> bytes:
        """Encode for transfer; `decode_cluster_index` is the inverse."""
        entries = [
            (part, fqn, spec.dtype, self.layout_numbers[part, fqn])
            for (part, fqn), spec in sorted(self.specs.items())
        ]
        document = {
            "folders": [
                [folder.root, folder.node, folder.folder_id, _deltas(folder.ranks), folder.files]
                for folder in self.folders
            ],
            "tensors": to_columns(entries),
            "layouts": [
                [layout.shape, np.diff(layout.boxes, axis=0, prepend=np.int64(0)).tolist()]
                for layout in self.layouts
            ],
            "rank_extras": self.rank_extras,
            "problems": self.problems,
            "save_id": self.save_id,
        }
        return zlib.compress(json.dumps(document, separators=(",", ":")).encode())


def _deltas(ranks: Sequence[int]) -> list[int]:
    """Return differences of consecutive ranks, which are nearly constant and so compress well."""
    return [current - previous for previous, current in pairwise((0, *ranks))]


def decode_cluster_index(body: bytes) -> ClusterIndex:
    """Decode the result of `ClusterIndex.encode`."""
    document = json.loads(zlib.decompress(body))
    layouts = [
        ShardLayout(
            tuple(shape),
            np.cumsum(np.array(deltas, np.int64).reshape(-1, 2 + 2 * len(shape)), axis=0),
        )
        for shape, deltas in document["layouts"]
    ]
    entries = from_columns(document["tensors"])
    return ClusterIndex(
        folders=[
            NodeFolder(root, node, folder_id, tuple(accumulate(deltas)), tuple(files))
            for root, node, folder_id, deltas, files in document["folders"]
        ],
        specs={
            (part, fqn): TensorSpec(dtype, layouts[number].shape)
            for part, fqn, dtype, number in entries
        },
        layout_numbers={(part, fqn): number for part, fqn, _, number in entries},
        layouts=layouts,
        rank_extras=document["rank_extras"],
        problems=tuple(document["problems"]),
        save_id=document["save_id"],
    )


def build_index(inventories: Sequence[Inventory]) -> ClusterIndex:
    """Build the index of one save, complete or not. The first folder's dtypes and shapes win."""
    folders_by_list: dict[int, tuple[TensorList, list[int]]] = {}  # with numbers of folders
    for number, inventory in enumerate(inventories):
        tensor_list = inventory.tensor_list
        folders_by_list.setdefault(id(tensor_list), (tensor_list, []))[1].append(number)
    tensor_lists = list(folders_by_list.values())
    specs: dict[Key, TensorSpec] = {}
    layouts_by_key: dict[Key, list[tuple[int, int]]] = {}  # (tensor list, layout class) pairs
    for i, (tensor_list, _) in enumerate(tensor_lists):
        for part, fqn, dtype, class_number in tensor_list.entries:
            spec = spec_of(dtype, tensor_list.layout_classes[class_number].shape)
            if specs.setdefault((part, fqn), spec) == spec:
                layouts_by_key.setdefault((part, fqn), []).append((i, class_number))
    layout_ids: dict[tuple[tuple[int, int], ...], int] = {}
    layout_numbers = {
        key: layout_ids.setdefault(tuple(layout_classes), len(layout_ids))
        for key, layout_classes in layouts_by_key.items()
    }
    spans_by_list = [
        np.stack([inventories[number].spans for number in folder_numbers])
        for _, folder_numbers in tensor_lists
    ]
    return ClusterIndex(
        folders=[
            NodeFolder(item.root, item.node, item.folder_id, item.ranks, item.files)
            for item in inventories
        ],
        specs=specs,
        layout_numbers=layout_numbers,
        layouts=[
            _merge_layout(layout_classes, tensor_lists, spans_by_list)
            for layout_classes in layout_ids
        ],
        rank_extras=max(inventory.rank_extras for inventory in inventories),
        problems=tuple(
            f"node {inventory.node}: {text}"
            for inventory in inventories
            for text in inventory.problems
        ),
        save_id=inventories[0].save_id,
    )


def _merge_layout(
    layout_classes: Iterable[tuple[int, int]],
    tensor_lists: Sequence[tuple[TensorList, list[int]]],
    spans_by_list: Sequence[Numbers],
) -> ShardLayout:
    """Merge layout classes of several tensor lists. `spans_by_list`: [folders, numbers] each."""
    rows = []
    shape: tuple[int, ...] = ()
    for i, number in layout_classes:
        tensor_list, folders = tensor_lists[i]
        layout_class = tensor_list.layout_classes[number]
        column = sum(earlier.width for earlier in tensor_list.layout_classes[:number])
        class_spans = spans_by_list[i][:, column : column + layout_class.width].reshape(
            len(folders) * layout_class.count, 2 * len(layout_class.shape)
        )
        folder_column = np.repeat(np.array(folders, np.int64), layout_class.count)[:, None]
        rows.append(
            np.hstack(
                [folder_column, np.full_like(folder_column, layout_class.are_shards), class_spans]
            )
        )
        shape = layout_class.shape
    boxes = np.concatenate(rows)
    return ShardLayout(shape, boxes[np.argsort(boxes[:, 0], kind="stable")])


def missing_boxes(index: ClusterIndex) -> list[str]:
    """Describe what no folder has, one sentence per tensor. Computed once per layout."""
    gaps_by_layout = [
        list(islice(coverage_gaps(layout.shape, layout.distinct_boxes()), 2))
        for layout in index.layouts
    ]
    messages = []
    for part, fqn in sorted(index.specs):
        layout_gaps = gaps_by_layout[index.layout_numbers[part, fqn]]
        if layout_gaps:
            first = layout_gaps[0]
            spans = ", ".join(
                f"{low}:{low + size}" for low, size in zip(first.offsets, first.shape, strict=True)
            )
            more = " and more" if len(layout_gaps) > 1 else ""
            messages.append(f"{part}:{fqn}: no node has [{spans}]{more}")
    return messages


def select_save(
    inventories: Sequence[Inventory], *, label: str, damaged: Sequence[str] = ()
) -> ClusterIndex:
    """Return the index of the newest save that is complete across the folders.

    Raises IncompleteError saying what is missing and which ranks wrote it. `damaged`: why some
    folders cannot be opened.
    """
    saves = group_by_value((inventory, inventory.save_id) for inventory in inventories)
    errors = []
    for save_id, save_inventories in sorted(
        saves.items(), key=lambda item: item[1][0].created, reverse=True
    ):
        index = build_index(save_inventories)
        problems = missing_of_save(save_inventories, index)
        if not problems:
            return index
        errors.append(
            format_list(f"{label}: save {save_id} is incomplete on the nodes present", problems)
        )
    raise IncompleteError(
        "\n".join([*errors, *damaged]) or f"{label}: no node has a checkpoint there"
    )


def missing_of_save(
    inventories: Sequence[Inventory], index: ClusterIndex | None = None
) -> list[str]:
    """Return why one save is incomplete, causes first; empty if its folders have everything."""
    index = index or build_index(inventories)
    problems, first = missing_boxes(index), inventories[0]
    present_groups = {
        inventory.group_number for inventory in inventories if not inventory.is_replica
    }
    named_parts = {part for inventory in inventories for part in inventory.tensor_list.parts}
    for part, (count, nbytes) in sorted(first.totals.items()):
        if part not in named_parts and len(present_groups) == first.group_count:
            continue  # deleted on every node, which is allowed
        sizes = [spec.nbytes for (spec_part, _), spec in index.specs.items() if spec_part == part]
        if [len(sizes), sum(sizes)] != [count, nbytes]:
            problems.append(
                f"{part}: missing {count - len(sizes)} of {count} tensors, "
                f"{nbytes - sum(sizes)} of {nbytes} bytes"
            )
    if not problems:
        return []
    absent_groups = [number for number in range(first.group_count) if number not in present_groups]
    absent_ranks = sorted(
        set(range(first.world_size))
        - {
            rank
            for inventory in inventories
            if not inventory.is_replica
            for rank in inventory.ranks
        }
    )
    causes = list(index.problems)
    if absent_groups:
        causes.insert(
            0,
            f"folder(s) {format_ranks(absent_groups)} of {first.group_count} are on no node "
            f"present; rank(s) {format_ranks(absent_ranks)} of the save wrote them; add the nodes "
            "or folders that have them",
        )
    return [*causes, *problems]  # causes first: the list may be truncated
