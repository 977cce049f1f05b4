"""One checkpoint out of the folders of several machines: what each holds, whether it is complete between them, and how to read it.

How wrong bytes could be read: a folder of another save with the same name is mixed in; a file is there and damaged; a machine's folder is
older than the others'. So only folders of one save id are joined, and every block that is read is compared with its digest here.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unified_ckpt.core.geometry import Box, runs, whole
from unified_ckpt.core.islands import FRAGMENTS, parse_fragment, uncovered
from unified_ckpt.core.sharding import TensorSpec
from unified_ckpt.core.tables import Key, listed, short
from unified_ckpt.engine.checkpoint import Folder
from unified_ckpt.engine.pieces import JointStorage, Piece, Whole, file_of
from unified_ckpt.engine.source import Catalog, Location, Said
from unified_ckpt.errors import CheckpointError, IncompleteError
from unified_ckpt.format.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Inventory:
    """What one folder holds, as its machine tells it. `lost`: what of it is not there or damaged, in sentences."""

    root: str
    machine: int
    save_id: str
    created: str
    count: int
    number: int
    ranks: tuple[int, ...]
    files: tuple[str, ...]
    tensors: Mapping[str, Mapping[str, tuple[str, tuple[int, ...], str, int]]]  # part -> name -> dtype, shape, file, first byte
    lost: tuple[str, ...]
    world_size: int
    totals: Mapping[str, Sequence[int]]  # part -> tensors and bytes of the whole save

    def encode(self) -> bytes:
        return zlib.compress(json.dumps({name: getattr(self, name) for name in self.__slots__}).encode(), 1)


def decode_inventory(body: bytes) -> Inventory:
    told = json.loads(zlib.decompress(body))
    tensors = {p: {n: (d, tuple(s), f, at) for n, (d, s, f, at) in of.items()} for p, of in told.pop("tensors").items()}
    lists = {name: tuple(told.pop(name)) for name in ("ranks", "files", "lost")}
    return Inventory(**{**told, **lists, "tensors": tensors})


def take_inventory(folder: Folder, *, machine: int) -> Inventory:
    """Looks at every file's size and header; leaves out, and says, what cannot be read."""
    manifest = folder.manifest
    if manifest is None:
        raise AssertionError("a folder without a manifest is never joined with others")
    island, lost, bad = manifest.island, [], set[str]()
    for file in sorted({folder.file_of(part, name) for part in folder.parts for name in folder.names(part)}):
        try:
            folder.check_files([file])
        except CheckpointError as error:
            bad.add(file)
            lost.append(str(error))
    tensors: dict[str, dict[str, tuple[str, tuple[int, ...], str, int]]] = {}
    for part in folder.parts:
        there = {name: folder.file_of(part, name) for name in folder.names(part) if folder.file_of(part, name) not in bad}
        names = [name for name, file in there.items() if name in folder.header(file)]
        lost += [f"{folder.storage.root}/{there[n]}: has no tensor {n!r}, which the index says" for n in there.keys() - set(names)]
        specs, at = folder.specs(part, names), folder.catalog([(part, name) for name in names]).locations
        tensors[part] = {n: (specs[n].dtype, specs[n].shape, at[part, n].file, at[part, n].start) for n in names}
    return Inventory(
        root=folder.storage.root,
        machine=machine,
        save_id=manifest.save_id,
        created=manifest.created,
        count=island.count if island else 1,
        number=island.number if island else 0,
        ranks=tuple(island.ranks) if island else tuple(range(manifest.world_size)),
        files=(*manifest.files(), *(f"{part}.safetensors.index.json" for part in folder.parts), "unified_checkpoint.json"),
        tensors=tensors,
        lost=tuple(lost),
        world_size=island.world_size if island else manifest.world_size,
        totals=island.totals if island else {p: [len(folder.names(p)), manifest.parts[p].total_nbytes] for p in folder.parts},
    )


def put_together(inventories: Sequence[Inventory], members: Sequence[int]) -> Whole:
    """What the folders `members` hold between them, and what is missing. Pure."""
    found = Whole()
    for number in members:
        for stored, tensors in inventories[number].tensors.items():
            for name, (dtype, shape, file, start) in tensors.items():
                parsed = parse_fragment(name) if stored.endswith(FRAGMENTS) else None
                fqn, box, of_all = parsed if parsed is not None else (name, whole(shape), shape)
                key = (stored.removesuffix(FRAGMENTS) if parsed is not None else stored, fqn)
                found.specs.setdefault(key, TensorSpec(dtype, of_all))
                piece = Piece(box, number, stored, name, TensorSpec(dtype, shape), Location(file, start))
                found.pieces.setdefault(key, []).append(piece)
    for key, pieces in sorted(found.pieces.items()):
        holes = uncovered(found.specs[key].shape, (piece.box for piece in pieces))
        if holes:
            spans = ", ".join(f"{low}:{low + n}" for low, n in zip(holes[0].offsets, holes[0].shape, strict=True))
            found.gaps.append(f"{key[0]}:{key[1]}: nobody has [{spans}]{' and more' if len(holes) > 1 else ''}")
    return found


def choose(inventories: Sequence[Inventory], *, where: str) -> tuple[list[int], Whole]:
    """The folders of the newest save that is complete between them. IncompleteError, saying what is missing and who had it."""
    saves: dict[str, list[int]] = {}
    for number, one in enumerate(inventories):
        saves.setdefault(one.save_id, []).append(number)
    errors = []
    for save_id, members in sorted(saves.items(), key=lambda item: inventories[item[1][0]].created, reverse=True):
        found = put_together(inventories, members)
        problems = _problems([inventories[n] for n in members], found)
        if not problems:
            return members, found
        errors.append(listed(f"{where}: save {save_id} is not complete among the machines", problems))
    raise IncompleteError("\n".join(errors) or f"{where}: no machine has a checkpoint there")


def _problems(inventories: Sequence[Inventory], found: Whole) -> list[str]:
    """Why a save is not complete; empty when it is. A folder that is away is no problem if the others have all that it had."""
    problems = list(found.gaps)
    here = {one.number for one in inventories}
    named = {part.removesuffix(FRAGMENTS) for one in inventories for part in one.tensors}
    for part, (count, nbytes) in sorted(inventories[0].totals.items()):
        if part not in named and len(here) == inventories[0].count:
            continue  # deleted on every machine, which is allowed
        sizes = [spec.nbytes for (of, _), spec in found.specs.items() if of == part]
        if [len(sizes), sum(sizes)] != [count, nbytes]:
            problems.append(f"{part}: nobody names {count - len(sizes)} of {count} tensors, {nbytes - sum(sizes)} of {nbytes} bytes")
    if not problems:
        return []
    away = [number for number in range(inventories[0].count) if number not in here]
    had = sorted(set(range(inventories[0].world_size)) - {rank for one in inventories for rank in one.ranks})
    why = [f"machine {one.machine}: {text}" for one in inventories for text in one.lost]
    if away:
        why = [
            f"folder(s) {short(away)} of {inventories[0].count} are on no machine here; rank(s) {short(had)} of the save wrote them",
            *why,
        ]
    return [*why, *problems]  # the cause first: the list may be cut off


class Joint:
    """The folders of one save on several machines, as a Source. `folders`: by number, opened here or through a peer, for some ranks."""

    def __init__(self, found: Whole, folders: Mapping[int, Folder], *, own: Collection[int], lost: Sequence[str], turn: int) -> None:
        self._found, self._folders, self._own = found, folders, frozenset(own)
        self._order = sorted(folders, key=lambda number: (number not in own, number))
        self.storage = JointStorage(found, folders, own=own, turn=turn)
        self.storage.ledger.damage.extend(lost)
        self._names: dict[str, dict[str, None]] = {}
        for part, name in found.pieces:
            self._names.setdefault(part, {})[name] = None

    @property
    def format(self) -> str:
        return "unified"

    @property
    def parts(self) -> Sequence[str]:
        return sorted(self._names)

    def names(self, part: str) -> Collection[str]:
        return self._names.get(part, {}).keys()

    def aliases(self, part: str) -> Mapping[str, str]:
        return self._one.aliases(part)

    def specs(self, part: str, names: Collection[str]) -> Mapping[str, TensorSpec]:
        return {name: self._found.specs[part, name] for name in names}

    def read(self, part: str, name: str, box: Box) -> bytes:
        spec = self._found.specs[part, name]
        item = spec.nbytes // max(whole(spec.shape).numel, 1)
        found = bytearray(box.numel * item)
        view = memoryview(found)
        for first, local, count in runs(box, spec.shape, local=whole(box.shape), local_shape=box.shape):
            self.storage.read_at(file_of((part, name)), first * item, view[local * item : (local + count) * item])
        return bytes(found)

    def catalog(self, wanted: Collection[Key]) -> Catalog:
        return Catalog(self.storage, {key: Location(file_of(key), 0) for key in wanted}, self.storage.ledger)

    def block_digests(self, wanted: Collection[Key]) -> Mapping[Key, Sequence[int] | None]:
        return dict.fromkeys(wanted)  # `storage` compares those of the pieces

    def said(self) -> Said:
        """What the first folder says whose files are sound: all say the same of the whole."""
        errors: list[CheckpointError] = []
        for number in self._order:
            try:
                said = self._folders[number].said()
            except CheckpointError as error:
                errors.append(error)
                continue
            self.storage.ledger.damage.extend(map(str, errors))
            manifests = [folder.manifest for folder in self._folders.values() if folder.manifest is not None]
            island = next((one.island for one in manifests if one.island is not None), None)
            spoken = any(one.rank_extra is not None for one in manifests)
            return said if island is None else replace(said, rank_extras=island.world_size if spoken else 0)
        raise errors[0]

    def rank_extra(self, rank: int) -> Any:
        errors: list[CheckpointError] = []
        for number in self._order:
            folder = self._folders[number]
            island = folder.manifest.island if folder.manifest is not None else None
            if island is not None and rank not in island.ranks:
                continue
            try:
                found = folder.rank_extra(island.ranks.index(rank) if island is not None else rank)
            except CheckpointError as error:
                errors.append(error)
                continue
            self.storage.ledger.damage.extend(map(str, errors))
            return found
        if errors:
            raise errors[0]
        self.storage.ledger.damage.append(f"rank_extra of rank {rank} is not given back: the folder that has it is on no machine here")
        return None

    @property
    def manifests(self) -> list[Manifest]:
        """Of all folders, in the order of the islands that wrote them."""
        found = [folder.manifest for folder in self._folders.values() if folder.manifest is not None]
        return sorted(found, key=lambda one: one.island.number if one.island is not None else -1)

    @property
    def here(self) -> list[Folder]:
        """The folders that lie on this machine, in the order of the islands that wrote them."""
        own = [self._folders[number] for number in self._own]
        return sorted(own, key=lambda one: one.manifest.island.number if one.manifest and one.manifest.island else -1)

    def nbytes_here(self, part: str, name: str) -> int:
        """About how many bytes of a tensor lie on this machine: a byte that it has in two boxes counts twice."""
        boxes = {piece.box: piece.spec.nbytes for piece in self._found.pieces[part, name] if piece.folder in self._own}
        return min(sum(boxes.values()), self._found.specs[part, name].nbytes)

    def close(self) -> None:
        for folder in self._folders.values():
            folder.close()

    @property
    def _one(self) -> Folder:
        """Any of them: they say the same of the whole."""
        return self._folders[self._order[0]]
