"""What one folder holds of a save, as its machine tells rank 0. Small, for most tensors of a model
are cut alike: folders that name the same tensors share a `TensorList`, told once for all of them,
and differ in a few numbers.

Does not say where in its files a tensor lies: who reads from a folder reads its headers.
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

from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX, parse_shard_name, shard_name
from unified_ckpt.core.sharding.boxes import Box, full_box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.folder.reader import Folder
from unified_ckpt.errors import CheckpointError
from unified_ckpt.format.names import MANIFEST
from unified_ckpt.runtime.comm.topology import file_system_type
from unified_ckpt.runtime.storage.storage import LocalStorage

Numbers = npt.NDArray[np.int64]
TensorEntry = tuple[
    str, str, str, int
]  # of a table of tensors: part, fqn, dtype, number of its kind or family


@dataclass(frozen=True, slots=True)
class LayoutClass:
    """Tensors of one shape, of which a folder has the same `count` boxes: as fragments, or as
    tensors that are whole.
    """

    shape: tuple[int, ...]
    are_shards: bool
    count: int

    @property
    def width(self) -> int:
        """Numbers that say where the boxes are."""
        return self.count * 2 * len(self.shape)


@dataclass(frozen=True, slots=True)
class TensorList:
    """The tensors that a folder names, sorted, each with its kind. `parts`: also those without
    tensors.
    """

    parts: tuple[str, ...]
    layout_classes: tuple[LayoutClass, ...]
    entries: tuple[TensorEntry, ...]

    def encode(self) -> bytes:
        class_rows = [
            [layout_class.shape, layout_class.are_shards, layout_class.count]
            for layout_class in self.layout_classes
        ]
        return json.dumps(
            [self.parts, class_rows, to_columns(self.entries)], separators=(",", ":")
        ).encode()


@dataclass(frozen=True, slots=True, eq=False)
class Inventory:
    """What one folder holds, as its machine tells it. `spans`: offsets and shape of each box of
    each kind of the listing, flat.
    `folder_id`: the same where machines see one folder, empty where nobody can tell.

    `lost`: what of it is not there or damaged, in sentences. `totals`: tensors and bytes of the
    whole save, by part. `rank_extras`: how many ranks of the save left one, 0 where this folder has
    none. `is_replica`: it is what another machine keeps of a folder.
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
    listing: TensorList
    spans: Numbers
    lost: tuple[str, ...]
    world_size: int
    totals: Mapping[str, Sequence[int]]
    rank_extras: int
    is_replica: bool = False

    def encode(self, *, tensor_list: str) -> bytes:
        """`tensor_list`: the name by which the listing is told."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return zlib.compress(
            json.dumps({**values, "listing": tensor_list, "spans": self.spans.tolist()}).encode(), 1
        )


def decode_inventory(body: bytes, tensor_list_of: Callable[[str], TensorList]) -> Inventory:
    """The inverse. `tensor_list_of`: what is told by a name."""
    values = json.loads(zlib.decompress(body))
    values.update({name: tuple(values[name]) for name in ("ranks", "files", "lost")})
    return Inventory(
        **{
            **values,
            "listing": tensor_list_of(values["listing"]),
            "spans": np.array(values["spans"], np.int64),
        }
    )


def tensor_list_name(body: bytes) -> str:
    """A name that equal listings share."""
    return hashlib.sha256(body).hexdigest()[:32]


def decode_tensor_list(body: bytes) -> TensorList:
    parts, class_rows, columns = json.loads(body)
    return TensorList(
        tuple(parts),
        tuple(
            LayoutClass(tuple(shape), are_shards, count) for shape, are_shards, count in class_rows
        ),
        tuple(from_columns(columns)),
    )


def to_columns(entries: Iterable[TensorEntry]) -> list[Any]:
    """Lines for JSON: by part, the names, and of each the number of its dtype and its own."""
    dtypes: dict[str, int] = {}
    by_part: dict[str, tuple[list[str], list[int], list[int]]] = {}
    for part, fqn, dtype, number in entries:
        names, dtype_numbers, numbers = by_part.setdefault(part, ([], [], []))
        names.append(fqn)
        dtype_numbers.append(dtypes.setdefault(dtype, len(dtypes)))
        numbers.append(number)
    return [list(dtypes), by_part]


def from_columns(columns: Sequence[Any]) -> list[TensorEntry]:
    """The inverse of `to_columns`, for lines sorted by part."""
    dtypes, by_part = columns
    return [
        (part, fqn, dtypes[dtype], number)
        for part, lists in by_part.items()
        for fqn, dtype, number in zip(*lists, strict=True)
    ]


def stored_key(key: Key, box: Box, shape: Sequence[int], *, is_shard: bool) -> Key:
    """Part and name by which a folder stores a box of a tensor."""
    return (key[0] + SHARD_SUFFIX, shard_name(key[1], box, shape)) if is_shard else key


def classify(stored: Mapping[str, Mapping[str, TensorSpec]]) -> tuple[TensorList, Numbers]:
    """What a folder stores, by its own parts and names, as tensors of the save; and where the boxes
    of each kind are. Pure.
    """
    boxes_by_tensor: dict[tuple[str, str, str, tuple[int, ...], bool], list[Box]] = {}
    for part, tensors in stored.items():
        for name, spec in tensors.items():
            parsed = parse_shard_name(name) if part.endswith(SHARD_SUFFIX) else None
            if parsed is not None and parsed[1].shape == spec.shape:
                fqn, box, shape = parsed
                boxes_by_tensor.setdefault(
                    (part.removesuffix(SHARD_SUFFIX), fqn, spec.dtype, shape, True), []
                ).append(box)
            else:
                boxes_by_tensor[part, name, spec.dtype, spec.shape, False] = [full_box(spec.shape)]
    numbers: dict[tuple[tuple[int, ...], bool, tuple[Box, ...]], int] = {}
    entries = []
    for (part, fqn, dtype, shape, are_shards), boxes in sorted(
        boxes_by_tensor.items(), key=lambda item: item[0]
    ):
        class_key = (
            shape,
            are_shards,
            tuple(sorted(boxes, key=lambda box: (box.offsets, box.shape))),
        )
        entries.append((part, fqn, dtype, numbers.setdefault(class_key, len(numbers))))
    layout_classes = tuple(
        LayoutClass(shape, are_shards, len(boxes)) for shape, are_shards, boxes in numbers
    )
    parts = tuple(sorted({part.removesuffix(SHARD_SUFFIX) for part in stored}))
    flat = [
        number for _, _, boxes in numbers for box in boxes for number in (*box.offsets, *box.shape)
    ]
    return TensorList(parts, layout_classes, tuple(entries)), np.array(flat, np.int64)


def read_inventory(folder: Folder, *, node: int, is_replica: bool) -> Inventory:
    """Looks at every file's size and header; leaves out, and says, what cannot be read.
    `is_replica`: of another machine's folder.
    """
    manifest = folder.manifest
    if manifest is None:
        raise AssertionError("a folder without a manifest is never joined with others")
    node_group, record = manifest.node_group, manifest.rank_extra
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
        ranks=tuple(node_group.ranks) if node_group else tuple(range(manifest.world_size)),
        files=(*manifest.files(), MANIFEST),
        listing=tensor_list,
        spans=spans,
        lost=tuple(problems),
        world_size=node_group.world_size if node_group else manifest.world_size,
        totals=node_group.totals
        if node_group
        else {
            part: [len(folder.names(part)), manifest.parts[part].total_nbytes]
            for part in folder.parts
        },
        rank_extras=0
        if record is None
        else node_group.world_size
        if node_group
        else record.world_size,
        is_replica=is_replica,
    )


def _folder_id(folder: Folder) -> str:
    """The kind of the file system, and what tells the folder's manifest from a copy of it."""
    token = (
        folder.storage.version_token(MANIFEST) if isinstance(folder.storage, LocalStorage) else None
    )
    return (
        f"{file_system_type(folder.storage.root)} {'-'.join(map(str, token))}"
        if token is not None
        else ""
    )


def _readable_tensors(folder: Folder) -> tuple[dict[str, dict[str, TensorSpec]], list[str]]:
    """The tensors by stored part and name that are there to the last byte; and in sentences, what
    is not.
    """
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
            continue  # other folders may have it: who deletes it deletes it there
        names = [
            name
            for file, members in folder.tensors_by_file(part).items()
            if file not in bad_files
            for name in members
        ]
        stored[part] = dict(folder.specs(part, names))
    return stored, problems
