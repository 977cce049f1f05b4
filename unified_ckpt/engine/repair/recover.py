"""Finds intact blocks of a damaged folder's tensors: in copies, in shards, or combined from copies.

Every block returned has the digest that the damaged folder's own manifest leads to.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX, parse_shard_name
from unified_ckpt.core.sharding.boxes import Box, full_box, runs
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import memory_shape
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.nodes.coverage import NodeFolder, merge_tensor_lists
from unified_ckpt.engine.nodes.inventory import classify
from unified_ckpt.engine.nodes.storage import ShardedStorage, virtual_file
from unified_ckpt.engine.repair.expected import (
    Expected,
    FolderCopy,
    collect_expected,
    parse_digests,
    read_or_zeros,
    same_files,
)
from unified_ckpt.engine.source.protocol import Catalog, Location
from unified_ckpt.errors import CheckpointError, NotFoundError
from unified_ckpt.format import digests, header
from unified_ckpt.format.header import Entry
from unified_ckpt.format.manifest import DigestFile
from unified_ckpt.format.reconstruct import reconstruct
from unified_ckpt.runtime.storage.storage import Buffer, Reader

_BLOCK = digests.BLOCK_NBYTES


class BlockRecovery:
    """Finds intact blocks. `damage` describes damage of the sources."""

    def __init__(
        self, expected: Expected, target: FolderCopy, sources: Sequence[FolderCopy]
    ) -> None:
        self._expected, self._target, self._sources = expected, target, sources
        same_file_sources = [
            source.storage
            for source in sources
            if source.manifest is None or same_files(source.manifest, expected.manifest)
        ]
        self._same_file_storages = [
            target.storage,
            *same_file_sources,
        ]  # with the same files, so a block has the same offset in all
        self.damage: list[str] = []

    def block(self, part: str, name: str, file: str, block: int) -> bytes | None:
        """Return a block of a tensor, or None if no folder has it intact."""
        entry = self._expected.headers[file].entries[name]
        expected_crc = self._expected.block_crcs[part, name][block]
        start = block * _BLOCK
        nbytes = min(_BLOCK, entry.stop - entry.start - start)
        damaged: list[bytes] = []
        for candidate in self._candidates(part, name, file, entry, start, nbytes):
            if digests.crc(candidate) == expected_crc:
                return candidate
            damaged.append(candidate)
        return reconstruct(damaged, expected_crc)

    def close(self) -> None:
        """Close the sources' files until the next read."""
        for source in self._sources:
            source.storage.close()

    def rebuild_digests(self) -> None:
        """Rebuild the digest file from the tensors, if no copy is intact.

        Its CRC proves the result.
        """
        record = self._expected.manifest.digests
        if (
            record is None
            or record.file in self._expected.auxiliary_files
            or record.algorithm != digests.ALGORITHM
        ):
            return
        candidate_crcs: dict[
            str, list[list[int]]
        ] = {}  # candidate CRCs of each block, by name in the digest file
        for part in self._expected.parts:
            for file, name, entry in _entries(self._expected, part):
                candidate_crcs[f"{part}:{name}"] = [
                    list(
                        dict.fromkeys(
                            map(
                                digests.crc,
                                self._candidates(
                                    part,
                                    name,
                                    file,
                                    entry,
                                    offset,
                                    min(_BLOCK, entry.stop - entry.start - offset),
                                ),
                            )
                        )
                    )
                    for offset in range(0, entry.stop - entry.start, _BLOCK)
                ]
        if record.nbytes > header.MAX_HEADER_NBYTES + 8 * (
            1 + sum(map(len, candidate_crcs.values()))
        ):
            return  # the recorded size is impossible
        stored_bodies = [
            body
            for storage in self._same_file_storages
            if (body := read_or_zeros(storage, record.file, record.nbytes)) is not None
        ]
        built_bodies = [
            body
            for order in (*_name_orders(stored_bodies, record), sorted(candidate_crcs))
            for body in _digest_file_candidates(candidate_crcs, order)
            if len(body) == record.nbytes
        ]
        body_found = reconstruct([*built_bodies, *stored_bodies], int(record.crc, 16))
        if body_found is not None:
            self._expected.auxiliary_files[record.file] = body_found
            self._expected.block_crcs = parse_digests(body_found, record)

    def _candidates(
        self, part: str, name: str, file: str, entry: Entry, start: int, nbytes: int
    ) -> Iterator[bytes]:
        """Yield what each folder has in place of these bytes."""
        expected_crcs = self._expected.block_crcs.get((part, name))
        for number, storage in enumerate(self._same_file_storages):
            data = read_or_zeros(storage, file, nbytes, start=entry.start + start)
            if data is None:
                continue
            if (
                number
                and expected_crcs is not None
                and digests.crc(data) != expected_crcs[start // _BLOCK]
            ):
                self._record_damage(
                    f"{storage.root}/{file}: block {start // _BLOCK} of {part}:{name} is damaged "
                    "there too"
                )
            yield data
        for sharded in self._sharded_storages:
            body = bytearray(nbytes)
            try:
                _read_slices(sharded, part, name, entry, start, memoryview(body))
            except CheckpointError as error:
                self._record_damage(str(error))
                continue
            for message in sharded.verification_log.damage:
                self._record_damage(message)
            yield bytes(body)

    def _record_damage(self, message: str) -> None:
        if message not in self.damage:
            self.damage.append(message)

    @cached_property
    def _sharded_storages(self) -> list[ShardedStorage]:
        """The other nodes' tensors, assembled: verified, then unverified in each order."""
        folders: list[_VerifiedFolder] = []
        specs: list[dict[str, dict[str, TensorSpec]]] = []
        for source in self._sources:
            if source.manifest is None or same_files(source.manifest, self._expected.manifest):
                continue  # already read as a copy
            others = [self._target, *(other for other in self._sources if other is not source)]
            expected = collect_expected(source.manifest, source.storage, others)
            folders.append(
                _VerifiedFolder(source.storage, expected.block_crcs, _locations(expected))
            )
            specs.append({part: dict(_specs(expected, part)) for part in expected.parts})
        if not folders:
            return []
        members = [
            NodeFolder(folder.storage.root, number, "", (), ())
            for number, folder in enumerate(folders)
        ]
        index = merge_tensor_lists(members, [classify(stored) for stored in specs])
        unverified = [
            _VerifiedFolder(_ZeroFilledReader(folder.storage), {}, folder.locations)
            for folder in folders
        ]
        return [
            ShardedStorage(index, folders, local=(), rotation=0, complete=False),
            *(
                ShardedStorage(index, unverified, local=(), rotation=turn, complete=False)
                for turn in range(len(folders))
            ),
        ]


@dataclass(frozen=True, slots=True)
class _VerifiedFolder:
    """A source's files, with the digests and locations that are proved."""

    storage: Reader
    block_crcs: Mapping[Key, Sequence[int]]
    locations: Mapping[Key, Location]

    def file_of(self, part: str, name: str) -> str:
        """Return the file that has a tensor."""
        return self.locations[part, name].file

    def catalog(self, keys: Collection[Key]) -> Catalog:
        """Return storage and locations of these tensors."""
        return Catalog(self.storage, {key: self.locations[key] for key in keys})

    def block_digests(self, keys: Collection[Key]) -> Mapping[Key, Sequence[int] | None]:
        """Return the digests of these tensors."""
        return {key: self.block_crcs.get(key) for key in keys}


class _ZeroFilledReader:
    """A reader that returns zeros for bytes that cannot be read."""

    def __init__(self, storage: Reader) -> None:
        self.root, self._storage = storage.root, storage

    def read_at(self, name: str, start: int, into: Buffer) -> None:
        """Read bytes, zeros where they cannot be read. NotFoundError if the file is missing."""
        data = read_or_zeros(self._storage, name, len(into), start=start)
        if data is None:
            raise NotFoundError(f"{self.root}/{name}: is missing")
        into[:] = data

    def read(self, name: str) -> bytes:
        """Return a whole file."""
        return self._storage.read(name)

    def size(self, name: str) -> int | None:
        """Return a file's size."""
        return self._storage.size(name)

    def names(self) -> list[str]:
        """Return all file names."""
        return self._storage.names()

    def close(self) -> None:
        """Close the storage."""
        self._storage.close()


def _entries(expected: Expected, part: str) -> Iterator[tuple[str, str, Entry]]:
    """Yield (file, name, entry) of a part's tensors whose headers are known."""
    for file in expected.manifest.parts[part].files:
        for name, entry in (
            expected.headers[file].entries.items() if file in expected.headers else ()
        ):
            yield file, name, entry


def _specs(expected: Expected, part: str) -> Iterator[tuple[str, TensorSpec]]:
    for _, name, entry in _entries(expected, part):
        yield name, TensorSpec(entry.dtype, memory_shape(entry.dtype, entry.shape))


def _locations(expected: Expected) -> dict[Key, Location]:
    return {
        (part, name): Location(file, entry.start)
        for part in expected.parts
        for file, name, entry in _entries(expected, part)
    }


def _locate(part: str, name: str, entry: Entry) -> tuple[Key, Box, tuple[int, ...]]:
    """Return the whole tensor that a stored one belongs to, the box in it, and its shape."""
    parsed = parse_shard_name(name) if part.endswith(SHARD_SUFFIX) else None
    shape = memory_shape(entry.dtype, entry.shape)
    if parsed is not None and parsed[1].shape == shape:
        return (part.removesuffix(SHARD_SUFFIX), parsed[0]), parsed[1], parsed[2]
    return (part, name), full_box(shape), shape


def _name_orders(bodies: Sequence[bytes], record: DigestFile) -> Iterator[list[str]]:
    for body in bodies:
        try:
            yield list(header.parse_header(body, file_size=record.nbytes, file=record.file))
        except CheckpointError:
            continue


def _digest_file_candidates(
    candidate_crcs: Mapping[str, Sequence[Sequence[int]]], order: Sequence[str]
) -> Iterator[bytes]:
    """Yield digest files as the writer would make them, with each candidate CRC in turn."""
    if not candidate_crcs.keys() >= set(order):
        return
    header_bytes, _ = header.encode_header(
        (key, "U64", (len(candidate_crcs[key]),)) for key in order
    )
    blocks = [crcs or [0] for key in order for crcs in candidate_crcs[key]]
    for number in range(max(map(len, blocks), default=1)):
        yield header_bytes + struct.pack(
            f"<{len(blocks)}Q", *(crcs[min(number, len(crcs) - 1)] for crcs in blocks)
        )


def _read_slices(
    sharded: ShardedStorage, part: str, name: str, entry: Entry, start: int, into: memoryview
) -> None:
    """Fill `into` from byte `start` of a tensor or shard, from the sources' assembled tensors."""
    key, box, shape = _locate(part, name, entry)
    local_shape = box.shape
    itemsize = (entry.stop - entry.start) // box.numel
    if sharded.size(virtual_file(key)) != itemsize * full_box(shape).numel:
        raise CheckpointError(f"{key[0]}:{key[1]}: no source has any of it")
    low, high = 0, box.shape[0] if box.shape else 1  # rows of the shard
    if box.shape:
        row_nbytes = (entry.stop - entry.start) // box.shape[0]
        low, high = start // row_nbytes, -(-(start + len(into)) // row_nbytes)
        box = Box((box.offsets[0] + low, *box.offsets[1:]), (high - low, *box.shape[1:]))
    local = Box((low, *(0,) * (len(box.shape) - 1)), box.shape) if box.shape else full_box(())
    for first, in_local, count in runs(box, shape, local=local, local_shape=local_shape):
        lower = max(in_local * itemsize, start)
        upper = min((in_local + count) * itemsize, start + len(into))
        if lower < upper:
            sharded.read_at(
                virtual_file(key),
                first * itemsize + lower - in_local * itemsize,
                into[lower - start : upper - start],
            )
