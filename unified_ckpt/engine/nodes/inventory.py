"""What one folder holds of a save, as its machine tells rank 0. Small, for most tensors of a model are cut alike: folders that name the
same tensors share a `Listing`, told once for all of them, and differ in a few numbers.

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

from unified_ckpt.core.nodes.node_groups import FRAGMENTS, fragment_name, parse_fragment
from unified_ckpt.core.sharding.boxes import Box, whole
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.folder.reader import Folder
from unified_ckpt.errors import CheckpointError
from unified_ckpt.format.names import MANIFEST
from unified_ckpt.runtime.comm.topology import file_system
from unified_ckpt.runtime.storage.storage import LocalStorage

Numbers = npt.NDArray[np.int64]
Line = tuple[
    str, str, str, int
]  # of a table of tensors: part, fqn, dtype, number of its kind or family


@dataclass(frozen=True, slots=True)
class Kind:
    """Tensors of one shape, of which a folder has the same `count` boxes: as fragments, or as tensors that are whole."""

    shape: tuple[int, ...]
    fragments: bool
    count: int

    @property
    def width(self) -> int:
        """Numbers that say where the boxes are."""
        return self.count * 2 * len(self.shape)


@dataclass(frozen=True, slots=True)
class Listing:
    """The tensors that a folder names, sorted, each with its kind. `parts`: also those without tensors."""

    parts: tuple[str, ...]
    kinds: tuple[Kind, ...]
    lines: tuple[Line, ...]

    def encode(self) -> bytes:
        kinds = [[kind.shape, kind.fragments, kind.count] for kind in self.kinds]
        return json.dumps([self.parts, kinds, columns(self.lines)], separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True, eq=False)
class Inventory:
    """What one folder holds, as its machine tells it. `spans`: offsets and shape of each box of each kind of the listing, flat.
    `volume`: the same where machines see one folder, empty where nobody can tell.

    `lost`: what of it is not there or damaged, in sentences. `totals`: tensors and bytes of the whole save, by part. `rank_extras`: how
    many ranks of the save left one, 0 where this folder has none. `copy`: it is what another machine keeps of a folder.
    """

    root: str
    machine: int
    volume: str
    save_id: str
    created: str
    count: int
    number: int
    ranks: tuple[int, ...]
    files: tuple[str, ...]
    listing: Listing
    spans: Numbers
    lost: tuple[str, ...]
    world_size: int
    totals: Mapping[str, Sequence[int]]
    rank_extras: int
    copy: bool = False

    def encode(self, *, listing: str) -> bytes:
        """`listing`: the name by which the listing is told."""
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        return zlib.compress(
            json.dumps({**told, "listing": listing, "spans": self.spans.tolist()}).encode(), 1
        )


def decode_inventory(body: bytes, listing_of: Callable[[str], Listing]) -> Inventory:
    """The inverse. `listing_of`: what is told by a name."""
    told = json.loads(zlib.decompress(body))
    told.update({name: tuple(told[name]) for name in ("ranks", "files", "lost")})
    return Inventory(
        **{
            **told,
            "listing": listing_of(told["listing"]),
            "spans": np.array(told["spans"], np.int64),
        }
    )


def listing_name(body: bytes) -> str:
    """A name that equal listings share."""
    return hashlib.sha256(body).hexdigest()[:32]


def decode_listing(body: bytes) -> Listing:
    parts, kinds, lines = json.loads(body)
    return Listing(
        tuple(parts),
        tuple(Kind(tuple(s), fragments, count) for s, fragments, count in kinds),
        tuple(lines_of(lines)),
    )


def columns(lines: Iterable[Line]) -> list[Any]:
    """Lines for JSON: by part, the names, and of each the number of its dtype and its own."""
    dtypes: dict[str, int] = {}
    by_part: dict[str, tuple[list[str], list[int], list[int]]] = {}
    for part, fqn, dtype, number in lines:
        names, dtype_numbers, numbers = by_part.setdefault(part, ([], [], []))
        names.append(fqn)
        dtype_numbers.append(dtypes.setdefault(dtype, len(dtypes)))
        numbers.append(number)
    return [list(dtypes), by_part]


def lines_of(told: Sequence[Any]) -> list[Line]:
    """The inverse of `columns`, for lines sorted by part."""
    dtypes, by_part = told
    return [
        (part, fqn, dtypes[dtype], number)
        for part, lists in by_part.items()
        for fqn, dtype, number in zip(*lists, strict=True)
    ]


def stored_as(key: Key, box: Box, shape: Sequence[int], *, fragment: bool) -> Key:
    """Part and name by which a folder stores a box of a tensor."""
    return (key[0] + FRAGMENTS, fragment_name(key[1], box, shape)) if fragment else key


def classify(stored: Mapping[str, Mapping[str, TensorSpec]]) -> tuple[Listing, Numbers]:
    """What a folder stores, by its own parts and names, as tensors of the save; and where the boxes of each kind are. Pure."""
    held: dict[tuple[str, str, str, tuple[int, ...], bool], list[Box]] = {}
    for part, tensors in stored.items():
        for name, spec in tensors.items():
            found = parse_fragment(name) if part.endswith(FRAGMENTS) else None
            if found is not None and found[1].shape == spec.shape:
                fqn, box, shape = found
                held.setdefault(
                    (part.removesuffix(FRAGMENTS), fqn, spec.dtype, shape, True), []
                ).append(box)
            else:
                held[part, name, spec.dtype, spec.shape, False] = [whole(spec.shape)]
    numbers: dict[tuple[tuple[int, ...], bool, tuple[Box, ...]], int] = {}
    lines = []
    for (part, fqn, dtype, shape, fragments), boxes in sorted(
        held.items(), key=lambda item: item[0]
    ):
        cut = shape, fragments, tuple(sorted(boxes, key=lambda box: (box.offsets, box.shape)))
        lines.append((part, fqn, dtype, numbers.setdefault(cut, len(numbers))))
    kinds = tuple(Kind(shape, fragments, len(boxes)) for shape, fragments, boxes in numbers)
    parts = tuple(sorted({part.removesuffix(FRAGMENTS) for part in stored}))
    flat = [
        number for _, _, boxes in numbers for box in boxes for number in (*box.offsets, *box.shape)
    ]
    return Listing(parts, kinds, tuple(lines)), np.array(flat, np.int64)


def take_inventory(folder: Folder, *, machine: int, copy: bool) -> Inventory:
    """Looks at every file's size and header; leaves out, and says, what cannot be read. `copy`: of another machine's folder."""
    manifest = folder.manifest
    if manifest is None:
        raise AssertionError("a folder without a manifest is never joined with others")
    island, record = manifest.island, manifest.rank_extra
    stored, lost = _sound(folder)
    listing, spans = classify(stored)
    return Inventory(
        root=folder.storage.root,
        machine=machine,
        volume=_volume(folder),
        save_id=manifest.save_id,
        created=manifest.created,
        count=island.count if island else 1,
        number=island.number if island else 0,
        ranks=tuple(island.ranks) if island else tuple(range(manifest.world_size)),
        files=(*manifest.files(), MANIFEST),
        listing=listing,
        spans=spans,
        lost=tuple(lost),
        world_size=island.world_size if island else manifest.world_size,
        totals=island.totals
        if island
        else {p: [len(folder.names(p)), manifest.parts[p].total_nbytes] for p in folder.parts},
        rank_extras=0 if record is None else island.world_size if island else record.world_size,
        copy=copy,
    )


def _volume(folder: Folder) -> str:
    """The kind of the file system, and what tells the folder's manifest from a copy of it."""
    stamp = folder.storage.stamp(MANIFEST) if isinstance(folder.storage, LocalStorage) else None
    return (
        f"{file_system(folder.storage.root)} {'-'.join(map(str, stamp))}"
        if stamp is not None
        else ""
    )


def _sound(folder: Folder) -> tuple[dict[str, dict[str, TensorSpec]], list[str]]:
    """The tensors by stored part and name that are there to the last byte; and in sentences, what is not."""
    lost, bad = [], set[str]()
    for file in sorted(file for part in folder.parts for file in folder.members(part)):
        try:
            folder.check_files([file])
        except CheckpointError as error:
            bad.add(file)
            lost.append(str(error))
    stored: dict[str, dict[str, TensorSpec]] = {}
    for part in folder.parts:
        if folder.manifest is not None and not folder.manifest.parts[part].files:
            continue  # other folders may have it: who deletes it deletes it there
        there = [
            name
            for file, members in folder.members(part).items()
            if file not in bad
            for name in members
        ]
        stored[part] = dict(folder.specs(part, there))
    return stored, lost
