"""What one folder holds of a save, as its node describes it to rank 0.

Small, because most tensors are sharded alike: folders with the same tensors share one
`TensorList`, sent once, and differ in a few numbers. Locations in files are not included.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from unified_ckpt.core.nodes.node_groups import (
    SHARD_SUFFIX,
    base_part,
    parse_shard_key,
    shard_name,
)
from unified_ckpt.core.sharding.boxes import Box, full_box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.folder.folder import Folder
from unified_ckpt.errors import CheckpointError
from unified_ckpt.format.names import MANIFEST
from unified_ckpt.runtime.comm.topology import file_system_type
from unified_ckpt.runtime.storage.storage import LocalStorage

Numbers = npt.NDArray[np.int64]
TensorEntry = tuple[str, str, str, int]  # part, fqn, dtype, number of layout class or layout


@dataclass(frozen=True, slots=True)
class LayoutClass:
    """Tensors of one shape of which a folder holds the same `count` boxes, as shards or whole."""

    shape: tuple[int, ...]
    are_shards: bool
    count: int

    @property
    def width(self) -> int:
        """How many numbers describe the boxes."""
        return self.count * 2 * len(self.shape)


@dataclass(frozen=True, slots=True)
class TensorList:
    """The tensors in a folder, sorted, each with its layout class. `parts` includes empty ones."""

    parts: tuple[str, ...]
    layout_classes: tuple[LayoutClass, ...]
    entries: tuple[TensorEntry, ...]

    def encode(self) -> bytes:
        """Encode as JSON; `decode_tensor_list` is the inverse."""
        class_rows = [
            [layout_class.shape, layout_class.are_shards, layout_class.count]
            for layout_class in self.layout_classes
        ]
        return json.dumps(
            [self.parts, class_rows, to_columns(self.entries)], separators=(",", ":")
        ).encode()


@dataclass(frozen=True, slots=True, eq=False)
class Inventory:
    """What one folder holds. `spans`: offsets and shape of each box of each layout class, flat.

    `folder_id`: equal if nodes see one folder, empty if unknown. `totals`: tensors and bytes of
    the whole save, by part. `rank_extras`: how many ranks stored one, 0 if this folder has none.
    `is_replica`: the folder is another node's, kept as a replica.
    """

    root: str
    node: int
    folder_id: str
    save_id: str
    created: str
    group_count: int
    group_number: int
    ranks: tuple[int, ...]
    files: tuple[str, ...]
    tensor_list: TensorList
    spans: Numbers
    problems: tuple[str, ...]
    world_size: int
    totals: Mapping[str, Sequence[int]]
    rank_extras: int
    is_replica: bool = False

    def encode(self, *, list_name: str) -> bytes:
        """Encode for transfer. `list_name`: the name under which the tensor list is sent."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return zlib.compress(
            json.dumps({**values, "tensor_list": list_name, "spans": self.spans.tolist()}).encode(),
            1,
        )


def decode_inventory(body: bytes, tensor_list_of: Callable[[str], TensorList]) -> Inventory:
    """Decode the result of `Inventory.encode`. `tensor_list_of`: returns a sent list."""
    values = json.loads(zlib.decompress(body))
    values.update({name: tuple(values[name]) for name in ("ranks", "files", "problems")})
    return Inventory(
        **{
            **values,
            "tensor_list": tensor_list_of(values["tensor_list"]),
            "spans": np.array(values["spans"], np.int64),
        }
    )


def tensor_list_name(body: bytes) -> str:
    """Return a name that equal tensor lists share."""
    return hashlib.sha256(body).hexdigest()[:32]


def decode_tensor_list(body: bytes) -> TensorList:
    """Decode the result of `TensorList.encode`."""
    parts, class_rows, columns = json.loads(body)
    return TensorList(
        tuple(parts),
        tuple(
            LayoutClass(tuple(shape), are_shards, count) for shape, are_shards, count in class_rows
        ),
        tuple(from_columns(columns)),
    )


def to_columns(entries: Iterable[TensorEntry]) -> list[Any]:
    """Return entries as columns for JSON: by part, names, dtype numbers and layout numbers."""
    dtypes: dict[str, int] = {}
    by_part: dict[str, tuple[list[str], list[int], list[int]]] = {}
    for part, fqn, dtype, number in entries:
        names, dtype_numbers, numbers = by_part.setdefault(part, ([], [], []))
        names.append(fqn)
        dtype_numbers.append(dtypes.setdefault(dtype, len(dtypes)))
        numbers.append(number)
    return [list(dtypes), by_part]


def from_columns(columns: Sequence[Any]) -> list[TensorEntry]:
    """Return the entries of `to_columns`, which must be sorted by part."""
    dtypes, by_part = columns
    return [
        (part, fqn, dtypes[dtype], number)
        for part, lists in by_part.items()
        for fqn, dtype, number in zip(*lists, strict=True)
    ]


def stored_key(key: Key, box: Box, shape: Sequence[int], *, is_shard: bool) -> Key:
    """Return the part and name under which a folder stores a box of a tensor."""
    return (key[0] + SHARD_SUFFIX, shard_name(key[1], box, shape)) if is_shard else key


def locate_stored(key: Key, shape: tuple[int, ...]) -> tuple[Key, Box, tuple[int, ...], bool]:
    """Return the tensor of which `key` stores a box of this shape: its key, the box, its shape.

    Also returns whether the box is stored as a shard.
    """
    parsed = parse_shard_key(key)
    if parsed is None or parsed[1].shape != shape:
        return key, full_box(shape), shape, False
    fqn, box, tensor_shape = parsed
    return (base_part(key[0]), fqn), box, tensor_shape, True


def classify(stored: Mapping[str, Mapping[str, TensorSpec]]) -> tuple[TensorList, Numbers]:
    """Return what a folder stores as tensors of the save, and the boxes of each layout class."""
    boxes_by_tensor: dict[tuple[str, str, str, tuple[int, ...], bool], list[Box]] = {}
    for part, tensors in stored.items():
        for name, spec in tensors.items():
            key, box, shape, is_shard = locate_stored((part, name), spec.shape)
            boxes_by_tensor.setdefault((*key, spec.dtype, shape, is_shard), []).append(box)
    numbers: dict[tuple[tuple[int, ...], bool, tuple[Box, ...]], int] = {}
    entries = []
    for (part, fqn, dtype, shape, are_shards), boxes in sorted(
        boxes_by_tensor.items(), key=lambda item: item[0]
    ):
        sorted_boxes = tuple(sorted(boxes, key=lambda box: (box.offsets, box.shape)))
        class_key = (shape, are_shards, sorted_boxes)
        entries.append((part, fqn, dtype, numbers.setdefault(class_key, len(numbers))))
    layout_classes = tuple(
        LayoutClass(shape, are_shards, len(boxes)) for shape, are_shards, boxes in numbers
    )
    parts = tuple(sorted(set(map(base_part, stored))))
    flat = [
        number for _, _, boxes in numbers for box in boxes for number in (*box.offsets, *box.shape)
    ]
    return TensorList(parts, layout_classes, tuple(entries)), np.array(flat, np.int64)


def read_inventory(folder: Folder, *, node: int, is_replica: bool) -> Inventory:
    """Check every file's size and header, and describe what is readable.

    `is_replica`: the folder is a replica of another node's.
    """
    manifest = folder.require_manifest()
    node_group = manifest.node_group
    world_size = node_group.world_size if node_group else manifest.world_size
    rank_extra = manifest.rank_extra
    rank_extras = 0 if rank_extra is None else (node_group or rank_extra).world_size
    # a folder that fewer ranks converted has the `rank_extra` of all ranks of the save
    ranks = node_group.ranks if node_group else range(max(manifest.world_size, rank_extras))
    if node_group:
        totals = node_group.totals
    else:
        totals = {
            part: [len(folder.names(part)), manifest.parts[part].total_nbytes]
            for part in folder.parts
        }
    stored, problems = _readable_tensors(folder)
    tensor_list, spans = classify(stored)
    return Inventory(
        root=folder.storage.root,
        node=node,
        folder_id=_folder_id(folder),
        save_id=manifest.save_id,
        created=manifest.created,
        group_count=node_group.count if node_group else 1,
        group_number=node_group.number if node_group else 0,
        ranks=tuple(ranks),
        files=(*manifest.files(), MANIFEST),
        tensor_list=tensor_list,
        spans=spans,
        problems=tuple(problems),
        world_size=world_size,
        totals=totals,
        rank_extras=rank_extras,
        is_replica=is_replica,
    )


def _folder_id(folder: Folder) -> str:
    """Return the type of the file system and a token that tells the manifest from a copy of it."""
    storage = folder.storage
    token = storage.version_token(MANIFEST) if isinstance(storage, LocalStorage) else None
    if token is None:
        return ""
    return f"{file_system_type(storage.root)} {'-'.join(map(str, token))}"


def _readable_tensors(folder: Folder) -> tuple[dict[str, dict[str, TensorSpec]], list[str]]:
    """Return the specs of readable tensors by stored part and name, and what is not readable."""
    problems, bad_files = [], set[str]()
    for file in sorted(file for part in folder.parts for file in folder.tensors_by_file(part)):
        try:
            folder.check_files([file])
        except CheckpointError as error:
            bad_files.add(file)
            problems.append(str(error))
    stored: dict[str, dict[str, TensorSpec]] = {}
    for part in folder.parts:
        if folder.manifest is not None and not folder.manifest.parts[part].files:
            continue  # deleted here; other folders may have it
        names = [
            name
            for file, file_names in folder.tensors_by_file(part).items()
            if file not in bad_files
            for name in file_names
        ]
        stored[part] = dict(folder.specs(part, names))
    return stored, problems
