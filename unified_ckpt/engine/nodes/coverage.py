"""What the folders of one save hold between them, whether it is all there, and where each box of a tensor is. No effects.

Rank 0 puts it together and tells it to all. It grows with the tensors, and with the machines once for each family of tensors that all
machines hold alike, of which a model has a dozen: never with machines x tensors.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise
from operator import add

import numpy as np

from unified_ckpt.core.nodes.node_groups import uncovered
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.core.text import listed, short
from unified_ckpt.engine.nodes.inventory import (
    Inventory,
    Listing,
    Numbers,
    columns,
    lines_of,
    stored_as,
)
from unified_ckpt.errors import IncompleteError

_SIZE_NBYTES = 8  # of a body: the length of its words


@dataclass(frozen=True, slots=True)
class Member:
    """A folder of the save. `ranks`: that wrote it; `files`: that it has; `machine`: where it is now; `volume`: see `Inventory`."""

    root: str
    machine: int
    volume: str
    ranks: tuple[int, ...]
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """Tensors of one shape of which every folder holds the same boxes.

    `boxes`: a row for each box in each folder: which folder, 1 where it is a fragment there, offsets, shape.
    """

    shape: tuple[int, ...]
    boxes: Numbers  # [boxes, 2 + 2 * dims]

    def crossing(self, low: int, high: int) -> list[tuple[Box, int, bool]]:
        """The boxes with an element of rows [low, high) of dim 0, each with its folder and whether it is a fragment."""
        dims, found = len(self.shape), self.boxes
        if dims:
            found = found[
                (found[:, 2] < high)
                & (found[:, 2] + found[:, 2 + dims] > low)
                & (found[:, 2 + dims :] > 0).all(axis=1)
            ]
        return self._told(found)

    def of_folder(self, folder: int) -> list[tuple[Box, int, bool]]:
        """The boxes in one folder, in the same way."""
        return self._told(self.boxes[self.boxes[:, 0] == folder])

    def edges(self) -> list[int]:
        """Where boxes begin and end along dim 0, ascending, and the tensor too."""
        if not self.shape:
            return [0, 1]
        lows, sizes = self.boxes[:, 2].tolist(), self.boxes[:, 2 + len(self.shape)].tolist()
        return sorted({0, self.shape[0], *lows, *map(add, lows, sizes)})

    def distinct(self) -> list[Box]:
        dims = len(self.shape)
        return [
            Box(tuple(row[:dims]), tuple(row[dims:]))
            for row in set(map(tuple, self.boxes[:, 2:].tolist()))
        ]

    def _told(self, rows: Numbers) -> list[tuple[Box, int, bool]]:
        dims = len(self.shape)
        return [
            (Box(tuple(row[2 : 2 + dims]), tuple(row[2 + dims :])), row[0], bool(row[1]))
            for row in rows.tolist()
        ]


@dataclass(frozen=True, slots=True)
class Whole:
    """The tensors of one save and its folders. `numbers`: each tensor's family.

    `rank_extras`: how many ranks of the save left one, 0 for none; `lost`: in sentences, what of any machine is not there or damaged.
    """

    folders: Sequence[Member]
    specs: Mapping[Key, TensorSpec]
    numbers: Mapping[Key, int]
    families: Sequence[Family]
    rank_extras: int
    lost: tuple[str, ...] = ()
    save_id: str = ""

    def family(self, key: Key) -> Family:
        return self.families[self.numbers[key]]

    def stored_in(self, folder: int) -> list[Key]:
        """All tensors of a folder, by its own parts and names."""
        held = [family.of_folder(folder) for family in self.families]
        return [
            stored_as(key, box, spec.shape, fragment=fragment)
            for key, spec in self.specs.items()
            for box, _, fragment in held[self.numbers[key]]
        ]

    def encode(self) -> bytes:
        lines = [
            (part, fqn, spec.dtype, self.numbers[part, fqn])
            for (part, fqn), spec in sorted(self.specs.items())
        ]
        words = json.dumps(
            {
                "folders": [
                    [one.root, one.machine, one.volume, _steps(one.ranks), one.files]
                    for one in self.folders
                ],
                "tensors": columns(lines),
                "families": [[one.shape, len(one.boxes)] for one in self.families],
                "rank_extras": self.rank_extras,
                "lost": self.lost,
                "save_id": self.save_id,
            },
            separators=(",", ":"),
        ).encode()
        steps = [
            np.diff(one.boxes, axis=0, prepend=np.int64(0)).astype("<i8").tobytes()
            for one in self.families
        ]
        return zlib.compress(b"".join([len(words).to_bytes(_SIZE_NBYTES, "little"), words, *steps]))


def _steps(ranks: Sequence[int]) -> list[int]:
    """From each rank to the next: the same on most machines, so that they compress to next to nothing. Likewise of boxes."""
    return [after - before for before, after in pairwise((0, *ranks))]


def decode_whole(body: bytes) -> Whole:
    """The inverse of `Whole.encode`."""
    body = zlib.decompress(body)
    at = _SIZE_NBYTES + int.from_bytes(body[:_SIZE_NBYTES], "little")
    told = json.loads(body[_SIZE_NBYTES:at])
    families = []
    for shape, count in told["families"]:
        width = 2 + 2 * len(shape)
        steps = np.frombuffer(body, "<i8", count * width, at).reshape(count, width)
        families.append(Family(tuple(shape), np.cumsum(steps, axis=0, dtype=np.int64)))
        at += steps.nbytes
    lines = lines_of(told["tensors"])
    return Whole(
        folders=[
            Member(root, at, volume, tuple(accumulate(steps)), tuple(files))
            for root, at, volume, steps, files in told["folders"]
        ],
        specs={
            (part, fqn): TensorSpec(dtype, families[number].shape)
            for part, fqn, dtype, number in lines
        },
        numbers={(part, fqn): number for part, fqn, _, number in lines},
        families=families,
        rank_extras=told["rank_extras"],
        lost=tuple(told["lost"]),
        save_id=told["save_id"],
    )


def put_together(inventories: Sequence[Inventory]) -> Whole:
    """What the folders of one save hold between them, complete or not. Where they differ on a dtype or shape, the first is right."""
    found = join(
        [Member(one.root, one.machine, one.volume, one.ranks, one.files) for one in inventories],
        [(one.listing, one.spans) for one in inventories],
        rank_extras=max(one.rank_extras for one in inventories),
        lost=tuple(f"machine {one.machine}: {text}" for one in inventories for text in one.lost),
    )
    return replace(found, save_id=inventories[0].save_id)


def join(
    members: Sequence[Member],
    names: Sequence[tuple[Listing, Numbers]],
    *,
    rank_extras: int = 0,
    lost: tuple[str, ...] = (),
) -> Whole:
    """`put_together` of folders of which no more is known. `names`: what each names, and where its boxes are."""
    told: dict[int, tuple[Listing, list[int]]] = {}  # a listing, and the folders that it is of
    for number, (listing, _) in enumerate(names):
        told.setdefault(id(listing), (listing, []))[1].append(number)
    listings = list(told.values())
    specs: dict[Key, TensorSpec] = {}
    held: dict[Key, list[tuple[int, int]]] = {}  # by tensor: listing and kind
    for i, (listing, _) in enumerate(listings):
        known: dict[tuple[str, int], TensorSpec] = {}
        for part, fqn, dtype, kind in listing.lines:
            spec = known.get((dtype, kind)) or known.setdefault(
                (dtype, kind), TensorSpec(dtype, listing.kinds[kind].shape)
            )
            if specs.setdefault((part, fqn), spec) == spec:
                held.setdefault((part, fqn), []).append((i, kind))
    families: dict[tuple[tuple[int, int], ...], int] = {}
    numbers = {key: families.setdefault(tuple(kinds), len(families)) for key, kinds in held.items()}
    spans = [np.stack([names[number][1] for number in folders]) for _, folders in listings]
    return Whole(
        folders=members,
        specs=specs,
        numbers=numbers,
        families=[_family(kinds, listings, spans) for kinds in families],
        rank_extras=rank_extras,
        lost=lost,
    )


def _family(
    kinds: Iterable[tuple[int, int]],
    listings: Sequence[tuple[Listing, list[int]]],
    spans: Sequence[Numbers],
) -> Family:
    """The boxes of some kinds of some listings. `spans`: of each listing, those of all its folders [folders, numbers]."""
    rows = []
    shape: tuple[int, ...] = ()
    for i, number in kinds:
        listing, folders = listings[i]
        kind, at = listing.kinds[number], sum(one.width for one in listing.kinds[:number])
        of_kind = spans[i][:, at : at + kind.width].reshape(
            len(folders) * kind.count, 2 * len(kind.shape)
        )
        first = np.repeat(np.array(folders, np.int64), kind.count)[:, None]
        rows.append(np.hstack([first, np.full_like(first, kind.fragments), of_kind]))
        shape = kind.shape
    found = np.concatenate(rows)
    return Family(shape, found[np.argsort(found[:, 0], kind="stable")])


def gaps(found: Whole) -> list[str]:
    """In sentences, what no folder has, by tensor. Proved once for a family."""
    holes = [
        list(islice(uncovered(family.shape, family.distinct()), 2)) for family in found.families
    ]
    told = []
    for part, fqn in sorted(found.specs):
        some = holes[found.numbers[part, fqn]]
        if some:
            spans = ", ".join(
                f"{low}:{low + n}" for low, n in zip(some[0].offsets, some[0].shape, strict=True)
            )
            told.append(f"{part}:{fqn}: nobody has [{spans}]{' and more' if len(some) > 1 else ''}")
    return told


def choose(inventories: Sequence[Inventory], *, where: str, damaged: Sequence[str] = ()) -> Whole:
    """The newest save that is complete between the folders. IncompleteError, saying what is missing and who had it. `damaged`: of folders
    that cannot be opened, why."""
    saves: dict[str, list[Inventory]] = {}
    for one in inventories:
        saves.setdefault(one.save_id, []).append(one)
    errors = []
    for save_id, members in sorted(
        saves.items(), key=lambda item: item[1][0].created, reverse=True
    ):
        found = put_together(members)
        problems = _problems(members, found)
        if not problems:
            return found
        errors.append(
            listed(f"{where}: save {save_id} is not complete among the machines", problems)
        )
    raise IncompleteError(
        "\n".join([*errors, *damaged]) or f"{where}: no machine has a checkpoint there"
    )


def _problems(inventories: Sequence[Inventory], found: Whole) -> list[str]:
    """Why a save is not complete; empty when it is. A folder that is away is no problem if the others have all that it had."""
    problems, first = gaps(found), inventories[0]
    here = {one.number for one in inventories if not one.copy}
    named = {part for one in inventories for part in one.listing.parts}
    for part, (count, nbytes) in sorted(first.totals.items()):
        if part not in named and len(here) == first.count:
            continue  # deleted on every machine, which is allowed
        sizes = [spec.nbytes for (of, _), spec in found.specs.items() if of == part]
        if [len(sizes), sum(sizes)] != [count, nbytes]:
            problems.append(
                f"{part}: nobody names {count - len(sizes)} of {count} tensors, {nbytes - sum(sizes)} of {nbytes} bytes"
            )
    if not problems:
        return []
    away = [number for number in range(first.count) if number not in here]
    had = sorted(
        set(range(first.world_size))
        - {rank for one in inventories if not one.copy for rank in one.ranks}
    )
    why = list(found.lost)
    if away:
        why.insert(
            0,
            f"folder(s) {short(away)} of {first.count} are on no machine here; rank(s) {short(had)} of the save wrote them",
        )
    return [*why, *problems]  # the cause first: the list may be cut off
