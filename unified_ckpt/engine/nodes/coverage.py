"""What the folders of one save hold between them, whether it is all there, and where each box of a
tensor is. No effects.

Rank 0 puts it together and tells it to all. It grows with the tensors, and with the machines once
for each family of tensors that all machines hold alike, of which a model has a dozen: never with
machines x tensors.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise
from operator import add

import numpy as np

from unified_ckpt.core.nodes.node_groups import coverage_gaps
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.core.text import format_list, format_ranks
from unified_ckpt.engine.nodes.inventory import (
    Inventory,
    Numbers,
    TensorList,
    from_columns,
    stored_key,
    to_columns,
)
from unified_ckpt.errors import IncompleteError

_SIZE_NBYTES = 8  # of a body: the length of its words


@dataclass(frozen=True, slots=True)
class NodeFolder:
    """A folder of the save. `ranks`: that wrote it; `files`: that it has; `node`: where it is
    now; `folder_id`: see `Inventory`.
    """

    root: str
    node: int
    folder_id: str
    ranks: tuple[int, ...]
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ShardLayout:
    """Tensors of one shape of which every folder holds the same boxes.

    `boxes`: a row for each box in each folder: which folder, 1 where it is a fragment there,
    offsets, shape.
    """

    shape: tuple[int, ...]
    boxes: Numbers  # [boxes, 2 + 2 * dims]

    def boxes_in_rows(self, low: int, high: int) -> list[tuple[Box, int, bool]]:
        """The boxes with an element of rows [low, high) of dim 0, each with its folder and whether
        it is a fragment.
        """
        dims, rows = len(self.shape), self.boxes
        if dims:
            rows = rows[
                (rows[:, 2] < high)
                & (rows[:, 2] + rows[:, 2 + dims] > low)
                & (rows[:, 2 + dims :] > 0).all(axis=1)
            ]
        return self._decode_rows(rows)

    def boxes_in_folder(self, folder: int) -> list[tuple[Box, int, bool]]:
        """The boxes in one folder, in the same way."""
        return self._decode_rows(self.boxes[self.boxes[:, 0] == folder])

    def edges(self) -> list[int]:
        """Where boxes begin and end along dim 0, ascending, and the tensor too."""
        if not self.shape:
            return [0, 1]
        lows, sizes = self.boxes[:, 2].tolist(), self.boxes[:, 2 + len(self.shape)].tolist()
        return sorted({0, self.shape[0], *lows, *map(add, lows, sizes)})

    def distinct_boxes(self) -> list[Box]:
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
    """The tensors of one save and its folders. `layout_numbers`: each tensor's family.

    `rank_extras`: how many ranks of the save left one, 0 for none; `lost`: in sentences, what of
    any machine is not there or damaged.
    """

    folders: Sequence[NodeFolder]
    specs: Mapping[Key, TensorSpec]
    layout_numbers: Mapping[Key, int]
    layouts: Sequence[ShardLayout]
    rank_extras: int
    lost: tuple[str, ...] = ()
    save_id: str = ""

    def layout(self, key: Key) -> ShardLayout:
        return self.layouts[self.layout_numbers[key]]

    def keys_in_folder(self, folder: int) -> list[Key]:
        """All tensors of a folder, by its own parts and names."""
        boxes_by_layout = [layout.boxes_in_folder(folder) for layout in self.layouts]
        return [
            stored_key(key, box, spec.shape, is_shard=is_shard)
            for key, spec in self.specs.items()
            for box, _, is_shard in boxes_by_layout[self.layout_numbers[key]]
        ]

    def encode(self) -> bytes:
        entries = [
            (part, fqn, spec.dtype, self.layout_numbers[part, fqn])
            for (part, fqn), spec in sorted(self.specs.items())
        ]
        header = json.dumps(
            {
                "folders": [
                    [item.root, item.node, item.folder_id, _deltas(item.ranks), item.files]
                    for item in self.folders
                ],
                "tensors": to_columns(entries),
                "families": [[item.shape, len(item.boxes)] for item in self.layouts],
                "rank_extras": self.rank_extras,
                "lost": self.lost,
                "save_id": self.save_id,
            },
            separators=(",", ":"),
        ).encode()
        deltas = [
            np.diff(item.boxes, axis=0, prepend=np.int64(0)).astype("<i8").tobytes()
            for item in self.layouts
        ]
        return zlib.compress(
            b"".join([len(header).to_bytes(_SIZE_NBYTES, "little"), header, *deltas])
        )


def _deltas(ranks: Sequence[int]) -> list[int]:
    """From each rank to the next: the same on most machines, so that they compress to next to
    nothing. Likewise of boxes.
    """
    return [current - previous for previous, current in pairwise((0, *ranks))]


def decode_cluster_index(body: bytes) -> ClusterIndex:
    """The inverse of `Whole.encode`."""
    body = zlib.decompress(body)
    offset = _SIZE_NBYTES + int.from_bytes(body[:_SIZE_NBYTES], "little")
    header = json.loads(body[_SIZE_NBYTES:offset])
    layouts = []
    for shape, count in header["families"]:
        width = 2 + 2 * len(shape)
        deltas = np.frombuffer(body, "<i8", count * width, offset).reshape(count, width)
        layouts.append(ShardLayout(tuple(shape), np.cumsum(deltas, axis=0, dtype=np.int64)))
        offset += deltas.nbytes
    entries = from_columns(header["tensors"])
    return ClusterIndex(
        folders=[
            NodeFolder(root, offset, folder_id, tuple(accumulate(deltas)), tuple(files))
            for root, offset, folder_id, deltas, files in header["folders"]
        ],
        specs={
            (part, fqn): TensorSpec(dtype, layouts[number].shape)
            for part, fqn, dtype, number in entries
        },
        layout_numbers={(part, fqn): number for part, fqn, _, number in entries},
        layouts=layouts,
        rank_extras=header["rank_extras"],
        lost=tuple(header["lost"]),
        save_id=header["save_id"],
    )


def build_index(inventories: Sequence[Inventory]) -> ClusterIndex:
    """What the folders of one save hold between them, complete or not. Where they differ on a dtype
    or shape, the first is right.
    """
    index = merge_tensor_lists(
        [
            NodeFolder(
                inventory.root,
                inventory.node,
                inventory.folder_id,
                inventory.ranks,
                inventory.files,
            )
            for inventory in inventories
        ],
        [(inventory.listing, inventory.spans) for inventory in inventories],
        rank_extras=max(inventory.rank_extras for inventory in inventories),
        lost=tuple(
            f"machine {inventory.node}: {text}"
            for inventory in inventories
            for text in inventory.lost
        ),
    )
    return replace(index, save_id=inventories[0].save_id)


def merge_tensor_lists(
    folders: Sequence[NodeFolder],
    contents: Sequence[tuple[TensorList, Numbers]],
    *,
    rank_extras: int = 0,
    lost: tuple[str, ...] = (),
) -> ClusterIndex:
    """`build_index` of folders of which no more is known. `contents`: what each names, and where
    its boxes are.
    """
    folders_by_list: dict[
        int, tuple[TensorList, list[int]]
    ] = {}  # a listing, and the folders that it is of
    for number, (tensor_list, _) in enumerate(contents):
        folders_by_list.setdefault(id(tensor_list), (tensor_list, []))[1].append(number)
    tensor_lists = list(folders_by_list.values())
    specs: dict[Key, TensorSpec] = {}
    layouts_by_key: dict[Key, list[tuple[int, int]]] = {}  # by tensor: listing and kind
    for i, (tensor_list, _) in enumerate(tensor_lists):
        spec_cache: dict[tuple[str, int], TensorSpec] = {}
        for part, fqn, dtype, class_number in tensor_list.entries:
            spec = spec_cache.get((dtype, class_number)) or spec_cache.setdefault(
                (dtype, class_number),
                TensorSpec(dtype, tensor_list.layout_classes[class_number].shape),
            )
            if specs.setdefault((part, fqn), spec) == spec:
                layouts_by_key.setdefault((part, fqn), []).append((i, class_number))
    layout_ids: dict[tuple[tuple[int, int], ...], int] = {}
    layout_numbers = {
        key: layout_ids.setdefault(tuple(layout_classes), len(layout_ids))
        for key, layout_classes in layouts_by_key.items()
    }
    spans_by_list = [
        np.stack([contents[number][1] for number in folder_numbers])
        for _, folder_numbers in tensor_lists
    ]
    return ClusterIndex(
        folders=folders,
        specs=specs,
        layout_numbers=layout_numbers,
        layouts=[
            _merge_layout(layout_classes, tensor_lists, spans_by_list)
            for layout_classes in layout_ids
        ],
        rank_extras=rank_extras,
        lost=lost,
    )


def _merge_layout(
    layout_classes: Iterable[tuple[int, int]],
    tensor_lists: Sequence[tuple[TensorList, list[int]]],
    spans_by_list: Sequence[Numbers],
) -> ShardLayout:
    """The boxes of some kinds of some listings. `spans_by_list`: of each listing, those of all its
    folders [folders, numbers].
    """
    rows = []
    shape: tuple[int, ...] = ()
    for i, number in layout_classes:
        tensor_list, folders = tensor_lists[i]
        layout_class, column = (
            tensor_list.layout_classes[number],
            sum(earlier.width for earlier in tensor_list.layout_classes[:number]),
        )
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
    """In sentences, what no folder has, by tensor. Proved once for a family."""
    gaps_by_layout = [
        list(islice(coverage_gaps(layout.shape, layout.distinct_boxes()), 2))
        for layout in index.layouts
    ]
    messages = []
    for part, fqn in sorted(index.specs):
        layout_gaps = gaps_by_layout[index.layout_numbers[part, fqn]]
        if layout_gaps:
            spans = ", ".join(
                f"{low}:{low + n}"
                for low, n in zip(layout_gaps[0].offsets, layout_gaps[0].shape, strict=True)
            )
            messages.append(
                f"{part}:{fqn}: nobody has [{spans}]{' and more' if len(layout_gaps) > 1 else ''}"
            )
    return messages


def select_save(
    inventories: Sequence[Inventory], *, label: str, damaged: Sequence[str] = ()
) -> ClusterIndex:
    """The newest save that is complete between the folders. IncompleteError, saying what is missing
    and who had it. `damaged`: of folders that cannot be opened, why.
    """
    saves: dict[str, list[Inventory]] = {}
    for inventory in inventories:
        saves.setdefault(inventory.save_id, []).append(inventory)
    errors = []
    for save_id, save_inventories in sorted(
        saves.items(), key=lambda item: item[1][0].created, reverse=True
    ):
        index = build_index(save_inventories)
        problems = _completeness_problems(save_inventories, index)
        if not problems:
            return index
        errors.append(
            format_list(f"{label}: save {save_id} is not complete among the machines", problems)
        )
    raise IncompleteError(
        "\n".join([*errors, *damaged]) or f"{label}: no machine has a checkpoint there"
    )


def _completeness_problems(inventories: Sequence[Inventory], index: ClusterIndex) -> list[str]:
    """Why a save is not complete; empty when it is. A folder that is away is no problem if the
    others have all that it had.
    """
    problems, first = missing_boxes(index), inventories[0]
    present_groups = {
        inventory.group_number for inventory in inventories if not inventory.is_replica
    }
    named_parts = {part for inventory in inventories for part in inventory.listing.parts}
    for part, (count, nbytes) in sorted(first.totals.items()):
        if part not in named_parts and len(present_groups) == first.group_count:
            continue  # deleted on every machine, which is allowed
        sizes = [spec.nbytes for (spec_part, _), spec in index.specs.items() if spec_part == part]
        if [len(sizes), sum(sizes)] != [count, nbytes]:
            problems.append(
                f"{part}: nobody names {count - len(sizes)} of {count} tensors, {nbytes - sum(sizes)} of {nbytes} bytes"
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
    causes = list(index.lost)
    if absent_groups:
        causes.insert(
            0,
            f"folder(s) {format_ranks(absent_groups)} of {first.group_count} are on no machine here; rank(s) {format_ranks(absent_ranks)} of the save wrote them",
        )
    return [*causes, *problems]  # the cause first: the list may be cut off
