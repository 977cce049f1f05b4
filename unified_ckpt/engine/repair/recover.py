"""Proved blocks of a damaged folder's tensors: each from the first folder that has it right, or out of slices, or out of damaged copies.

Nothing leaves here that does not have the digest which the damaged folder's own manifest leads to.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from unified_ckpt.core.nodes.node_groups import FRAGMENTS, parse_fragment
from unified_ckpt.core.sharding.boxes import Box, runs, whole
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import packed
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.nodes.coverage import Member, join
from unified_ckpt.engine.nodes.inventory import classify
from unified_ckpt.engine.nodes.storage import JointStorage, file_of
from unified_ckpt.engine.repair.expected import Copy, Truth, lenient, parse_digests, prove, same_cut
from unified_ckpt.engine.source.protocol import Catalog, Location
from unified_ckpt.errors import CheckpointError, NotFoundError
from unified_ckpt.format import digests, header
from unified_ckpt.format.header import Entry
from unified_ckpt.format.manifest import DigestFile
from unified_ckpt.format.reconstruct import mosaic
from unified_ckpt.runtime.storage.storage import Buffer, Reader

_BLOCK = digests.BLOCK_NBYTES


class Goods:
    """Where the good bytes are. `damage`: what of the sources was wrong, in sentences."""

    def __init__(self, truth: Truth, target: Copy, sources: Sequence[Copy]) -> None:
        self._truth, self._target, self._sources = truth, target, sources
        alike = [
            one.storage
            for one in sources
            if one.manifest is None or same_cut(one.manifest, truth.manifest)
        ]
        self._copies = [
            target.storage,
            *alike,
        ]  # of the same files: a block lies at the same place in all of them
        self.damage: list[str] = []

    def block(self, part: str, name: str, file: str, block: int) -> bytes | None:
        """A block of a tensor; None where no folder has it right."""
        entry, needed = self._truth.heads[file].entries[name], self._truth.blocks[part, name][block]
        start = block * _BLOCK
        nbytes = min(_BLOCK, entry.stop - entry.start - start)
        bad: list[bytes] = []
        for found in self._found(part, name, file, entry, start, nbytes):
            if digests.crc(found) == needed:
                return found
            bad.append(found)
        return mosaic(bad, needed)

    def close(self) -> None:
        """Lets go of the sources' files, of which there may be many, until the next is read."""
        for one in self._sources:
            one.storage.close()

    def redigest(self) -> None:
        """The digest file, where no copy of it is right, out of the tensors: if it then has its CRC, so have all of them.

        Of each block the folders may say different things; of all those the CRC proves one.
        """
        record = self._truth.manifest.digests
        if (
            record is None
            or record.file in self._truth.singles
            or record.algorithm != digests.ALGORITHM
        ):
            return
        claims: dict[
            str, list[list[int]]
        ] = {}  # by name in the digest file: of each block, what its CRC may be
        for part in self._truth.parts:
            for file, name, entry in _entries(self._truth, part):
                claims[f"{part}:{name}"] = [
                    list(
                        dict.fromkeys(
                            map(
                                digests.crc,
                                self._found(
                                    part,
                                    name,
                                    file,
                                    entry,
                                    low,
                                    min(_BLOCK, entry.stop - entry.start - low),
                                ),
                            )
                        )
                    )
                    for low in range(0, entry.stop - entry.start, _BLOCK)
                ]
        if record.nbytes > header.MAX_HEADER_NBYTES + 8 * (1 + sum(map(len, claims.values()))):
            return  # no such file can be
        kept = [
            body
            for storage in self._copies
            if (body := lenient(storage, record.file, record.nbytes)) is not None
        ]
        made = [
            body
            for order in (*_orders(kept, record), sorted(claims))
            for body in _digest_files(claims, order)
            if len(body) == record.nbytes
        ]
        right = mosaic([*made, *kept], int(record.crc, 16))
        if right is not None:
            self._truth.singles[record.file] = right
            self._truth.blocks = parse_digests(right, record)

    def _found(
        self, part: str, name: str, file: str, entry: Entry, start: int, nbytes: int
    ) -> Iterator[bytes]:
        """What the folders say these bytes are."""
        needed = self._truth.blocks.get((part, name))
        for number, storage in enumerate(self._copies):
            held = lenient(storage, file, nbytes, start=entry.start + start)
            if held is None:
                continue
            if number and needed is not None and digests.crc(held) != needed[start // _BLOCK]:
                self._tell(
                    f"{storage.root}/{file}: block {start // _BLOCK} of {part}:{name} is damaged there too"
                )
            yield held
        for joint in self._joints:
            body = bytearray(nbytes)
            try:
                _read_slices(joint, part, name, entry, start, memoryview(body))
            except CheckpointError as error:
                self._tell(str(error))
                continue
            for text in joint.ledger.damage:
                self._tell(text)
            yield bytes(body)

    def _tell(self, text: str) -> None:
        if text not in self.damage:
            self.damage.append(text)

    @cached_property
    def _joints(self) -> list[JointStorage]:
        """The other machines' tensors, put together: by digests that are proved, and without, in each order, for what those cannot tell.

        They may have a tensor in part: nobody has proved that they have all of it.
        """
        shelves: list[_Shelf] = []
        held: list[dict[str, dict[str, TensorSpec]]] = []
        for source in self._sources:
            if source.manifest is None or same_cut(source.manifest, self._truth.manifest):
                continue  # read already, as far as it has the bytes at all
            others = [self._target, *(one for one in self._sources if one is not source)]
            truth = prove(source.manifest, source.storage, others)
            shelves.append(_Shelf(source.storage, truth.blocks, _locations(truth)))
            held.append({part: dict(_specs(truth, part)) for part in truth.parts})
        if not shelves:
            return []
        members = [
            Member(shelf.storage.root, number, "", (), ()) for number, shelf in enumerate(shelves)
        ]
        found = join(members, [classify(stored) for stored in held])
        bare = [_Shelf(_Lenient(shelf.storage), {}, shelf.locations) for shelf in shelves]
        return [
            JointStorage(found, shelves, own=(), turn=0, proved=False),
            *(
                JointStorage(found, bare, own=(), turn=turn, proved=False)
                for turn in range(len(shelves))
            ),
        ]


@dataclass(frozen=True, slots=True)
class _Shelf:
    """A source's files, and what is proved of them: digests, and where its tensors lie."""

    storage: Reader
    blocks: Mapping[Key, Sequence[int]]
    locations: Mapping[Key, Location]

    def file_of(self, part: str, name: str) -> str:
        return self.locations[part, name].file

    def catalog(self, wanted: Collection[Key]) -> Catalog:
        return Catalog(self.storage, {key: self.locations[key] for key in wanted})

    def block_digests(self, wanted: Collection[Key]) -> Mapping[Key, Sequence[int] | None]:
        return {key: self.blocks.get(key) for key in wanted}


class _Lenient:
    """A folder whose bytes are zeros where they cannot be read: what is left of them may be what others lack."""

    def __init__(self, storage: Reader) -> None:
        self.root, self._storage = storage.root, storage

    def read_at(self, name: str, start: int, into: Buffer) -> None:
        found = lenient(self._storage, name, len(into), start=start)
        if found is None:
            raise NotFoundError(f"{self.root}/{name}: is missing")
        into[:] = found

    def read(self, name: str) -> bytes:
        return self._storage.read(name)

    def size(self, name: str) -> int | None:
        return self._storage.size(name)

    def names(self) -> list[str]:
        return self._storage.names()

    def close(self) -> None:
        self._storage.close()


def _entries(truth: Truth, part: str) -> Iterator[tuple[str, str, Entry]]:
    """(file, name, entry) of a part's tensors, as far as headers are known."""
    for file in truth.manifest.parts[part].files:
        for name, entry in truth.heads[file].entries.items() if file in truth.heads else ():
            yield file, name, entry


def _specs(truth: Truth, part: str) -> Iterator[tuple[str, TensorSpec]]:
    for _, name, entry in _entries(truth, part):
        yield name, TensorSpec(entry.dtype, packed(entry.dtype, entry.shape))


def _locations(truth: Truth) -> dict[Key, Location]:
    return {
        (part, name): Location(file, entry.start)
        for part in truth.parts
        for file, name, entry in _entries(truth, part)
    }


def _place(part: str, name: str, entry: Entry) -> tuple[Key, Box, tuple[int, ...]]:
    """Of a stored tensor: the whole one that it belongs to, where in it, and that one's shape."""
    parsed, shape = (
        parse_fragment(name) if part.endswith(FRAGMENTS) else None,
        packed(entry.dtype, entry.shape),
    )
    if parsed is not None and parsed[1].shape == shape:
        return (part.removesuffix(FRAGMENTS), parsed[0]), parsed[1], parsed[2]
    return (part, name), whole(shape), shape


def _orders(kept: Sequence[bytes], record: DigestFile) -> Iterator[list[str]]:
    for body in kept:
        try:
            yield list(header.parse_header(body, file_size=record.nbytes, file=record.file))
        except CheckpointError:
            continue


def _digest_files(
    claims: Mapping[str, Sequence[Sequence[int]]], order: Sequence[str]
) -> Iterator[bytes]:
    """As the writer makes it, with the first claim of each block, with the second … None for names that nobody has."""
    if not claims.keys() >= set(order):
        return
    head, _ = header.encode_header((key, "U64", (len(claims[key]),)) for key in order)
    blocks = [of or [0] for key in order for of in claims[key]]
    for number in range(max(map(len, blocks), default=1)):
        yield head + struct.pack(
            f"<{len(blocks)}Q", *(of[min(number, len(of) - 1)] for of in blocks)
        )


def _read_slices(
    joint: JointStorage, part: str, name: str, entry: Entry, start: int, into: memoryview
) -> None:
    """Fills `into` with bytes from `start` of a tensor or a fragment, out of the whole tensors that the sources make. Same errors as
    `JointStorage.read_at`, for a tensor that no source has too."""
    key, box, shape = _place(part, name, entry)
    local_shape = box.shape
    item = (entry.stop - entry.start) // box.numel
    if joint.size(file_of(key)) != item * whole(shape).numel:
        raise CheckpointError(f"{key[0]}:{key[1]}: no source has anything of it")
    low, high = 0, box.shape[0] if box.shape else 1  # rows of the fragment
    if box.shape:
        row = (entry.stop - entry.start) // box.shape[0]
        low, high = start // row, -(-(start + len(into)) // row)
        box = Box((box.offsets[0] + low, *box.offsets[1:]), (high - low, *box.shape[1:]))
    local = Box((low, *(0,) * (len(box.shape) - 1)), box.shape) if box.shape else whole(())
    for first, in_local, count in runs(box, shape, local=local, local_shape=local_shape):
        lower, upper = (
            max(in_local * item, start),
            min((in_local + count) * item, start + len(into)),
        )
        if lower < upper:
            joint.read_at(
                file_of(key),
                first * item + lower - in_local * item,
                into[lower - start : upper - start],
            )
