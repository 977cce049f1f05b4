"""The tensors of a source, whole, into the files of a folder under construction: every rank writes its share.

What could lose bytes: a byte is written twice or never; a block is damaged on the way. Shares are a pure function that every rank computes
for all ranks (`core/plan_merge.py`); the lead puts the digests of all blocks together and counts them.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from unified_ckpt.core.planning.merge_plan import MergedFile, plan_merge, share, shares
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import unpacked
from unified_ckpt.engine.folder import commit
from unified_ckpt.engine.source.protocol import Catalog, Source
from unified_ckpt.errors import IntegrityError, StorageError
from unified_ckpt.format import digests, header, names
from unified_ckpt.format.header import Entry
from unified_ckpt.format.manifest import FileRecord
from unified_ckpt.runtime.comm.collective import Meeting
from unified_ckpt.runtime.comm.topology import first_ranks
from unified_ckpt.runtime.storage.io_thread import Lane
from unified_ckpt.runtime.storage.storage import Buffer, LocalStorage

Beat = Callable[
    [int], object
]  # called with the bytes of each range that was written; what it raises ends the rewrite
Look = Callable[
    [Key, int, memoryview], object
]  # called with bytes of a tensor, from which byte they are, before they are written

_CHUNK_NBYTES = 4 << 20  # read, digested and written at a time: a whole number of digest blocks


class Output:
    """All positional writes of a rank into the folder under construction.

    The kernel is not asked to begin with the disk early, as saves do: `sync_file_range` waits where the disk is busy, and a rewrite reads
    meanwhile.
    """

    def __init__(self, storage: LocalStorage, folder: str, *, fsync: bool, beat: Beat) -> None:
        self._storage, self._folder, self._fsync, self.beat = storage, folder, fsync, beat
        self._written: set[str] = set()  # files that are not on the disk yet
        self.nbytes = 0

    def write_at(self, file: str, start: int, buffers: Sequence[Buffer]) -> None:
        """The buffers one after the other from byte `start`; they may change when it returns."""
        nbytes = sum(len(one) for one in buffers)
        self._storage.write_at(f"{self._folder}/{file}", start, buffers)
        self.nbytes += nbytes
        self._written.add(file)
        self.beat(nbytes)

    def flush(self) -> None:
        """Returns once all that was written is on the disk."""
        for file in sorted(self._written):
            if self._fsync:
                self._storage.sync(f"{self._folder}/{file}")
            self.beat(0)
        self._written.clear()


@dataclass(frozen=True, slots=True)
class Written:
    """What the lead knows when all is written: by part, which file has which tensor, and what each file is; the digests of all blocks."""

    weight_maps: Mapping[str, Mapping[str, str]]
    records: Mapping[str, Mapping[str, FileRecord]]
    blocks: Mapping[Key, array[int]]


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rewrite that all ranks have begun. `machines`: the machine of each rank; `sizes`: bytes of each tensor that is written."""

    meeting: Meeting
    source: Source
    storage: LocalStorage
    construction: commit.Construction
    lead: int
    machines: tuple[int, ...]
    files: Sequence[MergedFile]
    sizes: Mapping[Key, int]

    def share(self) -> Iterator[tuple[MergedFile, Key, int, int]]:
        """What this rank writes: bytes [start, stop) of tensors."""
        machine = self.machines[self.meeting.rank]
        peers = self._peers(machine)
        place = {"machine": machine, "index": peers.index(self.meeting.rank), "count": len(peers)}
        for span in share(self.files, self.sizes, block_nbytes=digests.BLOCK_NBYTES, **place):
            yield self.files[span.file], span.key, span.start, span.stop

    def shares(self) -> Iterator[tuple[int, Key, int, int]]:
        """What each rank writes, in the order of each: rank, bytes [start, stop) of tensors."""
        for machine in sorted({file.machine for file in self.files}):
            peers = self._peers(machine)
            spans = shares(
                self.files,
                self.sizes,
                machine=machine,
                count=len(peers),
                block_nbytes=digests.BLOCK_NBYTES,
            )
            for index, span in spans:
                yield peers[index], span.key, span.start, span.stop

    def head(self, file: MergedFile) -> tuple[bytes, dict[str, Entry]]:
        specs = self.source.specs(file.part, [name for _, name in file.keys])
        return header.encode_header(
            header.file_order(
                (n, spec.dtype, unpacked(spec.dtype, spec.shape)) for n, spec in specs.items()
            )
        )

    def _peers(self, machine: int) -> list[int]:
        return [rank for rank, one in enumerate(self.machines) if one == machine]


_ENTRY_NBYTES = 300  # of a tensor in headers, indexes and digests, beside its name


def check_room(work: Rewrite) -> None:
    """StorageError where the disk has no room for what is written."""
    text = sum(3 * len(name) + _ENTRY_NBYTES for _, name in work.sizes)
    commit.check_room(work.storage, work.construction, sum(work.sizes.values()), text_nbytes=text)


def sizes_of(source: Source) -> dict[Key, int]:
    return {
        (part, name): spec.nbytes
        for part in source.parts
        for name, spec in source.specs(part, source.names(part)).items()
    }


def who_sees(
    meeting: Meeting,
    storage: LocalStorage,
    construction: commit.Construction,
    machines: Sequence[int],
    *,
    lead: int,
) -> list[int]:
    """Collective. On the lead: the machines all of whose ranks see the folder under construction."""
    with meeting.phase("see"):
        try:
            commit.see(storage, construction)
            sees = b"1"
        except StorageError:
            if machines[meeting.rank] == machines[lead]:
                raise
            sees = b"0"
        told = meeting.collect("sees", sees, at=lead, ranks=range(meeting.world))
    blind = {machines[rank] for rank, one in enumerate(told) if one == b"0"}
    return sorted(set(machines) - blind)


def plan_files(
    meeting: Meeting,
    sizes: Mapping[Key, int],
    held: Mapping[Key, Mapping[int, int]],
    *,
    writers: Sequence[int],
    max_file_bytes: int,
    lead: int,
) -> list[MergedFile]:
    """Collective. `plan_merge` on the lead, told to all; `held`, `writers`: the lead's."""
    with meeting.phase("plan"):
        if meeting.rank == lead:
            files = plan_merge(sizes, held, writers=writers, max_file_bytes=max_file_bytes)
            body = json.dumps(
                [[file.part, file.number, file.count, file.keys, file.machine] for file in files]
            )
            meeting.put("files", zlib.compress(body.encode(), 1))
    told = json.loads(zlib.decompress(meeting.get("files")))
    return [
        MergedFile(part, number, count, tuple((p, n) for p, n in keys), machine)
        for part, number, count, keys, machine in told
    ]


def write_tensors(work: Rewrite, output: Output, look: Look | None = None) -> Written | None:
    """Collective. This rank's share. On the lead: what all have written."""
    meeting, machine = work.meeting, work.machines[work.meeting.rank]
    heads = {_name(file): work.head(file) for file in work.files if file.machine == machine}
    if meeting.rank in first_ranks(work.machines):
        for name, (head, _) in heads.items():
            output.write_at(name, 0, [memoryview(head)])
    share = list(work.share())
    catalog = work.source.catalog({key for _, key, _, _ in share})
    near = catalog.near or {}
    found: dict[tuple[Key, int], array[int]] = {
        (key, start): array("Q") for _, key, start, _ in share
    }

    def chunks() -> Iterator[_Chunk]:
        for file, key, start, stop in sorted(share, key=lambda span: near.get(span[1], "")):
            name = _name(file)
            first = heads[name][1][key[1]].start
            for low in range(start, stop, _CHUNK_NBYTES):
                yield _Chunk(
                    name, first + low, key, low, min(_CHUNK_NBYTES, stop - low), found[key, start]
                )

    with Lane(ranks=work.machines.count(machine)) as lane:
        for chunk, held in _read_ahead(lane, chunks(), catalog, look):
            output.write_at(chunk.file, chunk.at, [held])
    output.flush()
    own = b"." + b"".join(found[key, start].tobytes() for _, key, start, _ in share)
    told = meeting.collect("digests", own, at=work.lead, ranks=range(meeting.world))
    return _put_together(work, told) if meeting.rank == work.lead else None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Bytes [low, low + nbytes) of a tensor, which go to byte `at` of a file; `crcs` is where the digests of its blocks go."""

    file: str
    at: int
    key: Key
    low: int
    nbytes: int
    crcs: array[int]


def _read_ahead(
    lane: Lane, chunks: Iterator[_Chunk], catalog: Catalog, look: Look | None
) -> Iterator[tuple[_Chunk, memoryview]]:
    """Each chunk with its bytes, which change when the next but one is asked for: one is read while another is written."""
    buffers = [memoryview(bytearray(_CHUNK_NBYTES)) for _ in range(2)]

    def read(chunk: _Chunk, held: memoryview) -> None:
        at = catalog.locations[chunk.key]
        catalog.storage.read_at(at.file, at.start + chunk.low, held)
        if look is not None:
            look(chunk.key, chunk.low, held)
        chunk.crcs.extend(piece.crc for piece in digests.pieces(held, start=chunk.low))

    pending: tuple[_Chunk, memoryview, Future[None]] | None = None
    for number, chunk in enumerate(chunks):
        held = buffers[number % 2][: chunk.nbytes]
        begun = chunk, held, lane.submit(partial(read, chunk, held))
        if pending is not None:
            yield _done(*pending)
        pending = begun
    if pending is not None:
        yield _done(*pending)


def _done(chunk: _Chunk, held: memoryview, reading: Future[None]) -> tuple[_Chunk, memoryview]:
    reading.result()
    return chunk, held


def check_sizes(
    storage: LocalStorage, folder: str, records: Mapping[str, Mapping[str, FileRecord]]
) -> None:
    """StorageError for a file that is not as long as was written, as this rank sees it."""
    for name, record in (
        (name, record) for files in records.values() for name, record in files.items()
    ):
        size = storage.size(f"{folder}/{name}")
        if size != record.nbytes:
            raise StorageError(
                f"{storage.path(folder)}/{name}: has {size} bytes as this rank sees it; {record.nbytes} were written"
            )


def _name(file: MergedFile) -> str:
    return names.file_name(file.part, number=file.number, count=file.count)


def _put_together(work: Rewrite, told: Sequence[bytes]) -> Written:
    weight_maps: dict[str, dict[str, str]] = {}
    records: dict[str, dict[str, FileRecord]] = {}
    for file in work.files:
        head, entries = work.head(file)
        nbytes = max((entry.stop for entry in entries.values()), default=len(head))
        records.setdefault(file.part, {})[_name(file)] = FileRecord(
            nbytes=nbytes, header_crc=f"{digests.crc(head):016x}"
        )
        weight_maps.setdefault(file.part, {}).update({name: _name(file) for _, name in file.keys})
    return Written(weight_maps, records, _blocks(work, told))


def _blocks(work: Rewrite, told: Sequence[bytes]) -> dict[Key, array[int]]:
    """The digests of every block of every tensor, as the ranks tell them of their shares. IntegrityError for one too many or too few."""
    sizes = work.sizes
    found = {key: array("Q") for key in sorted(sizes)}
    of_rank = [array("Q", packed[1:]) for packed in told]
    read = [0] * len(told)
    spans = []
    for rank, key, start, stop in work.shares():
        count = digests.block_count(stop - start)
        spans.append((key, start, of_rank[rank][read[rank] : read[rank] + count]))
        read[rank] += count
    for rank, crcs in enumerate(of_rank):
        if read[rank] != len(crcs):
            raise IntegrityError(
                f"rank {rank} tells {len(crcs)} digests; needed {read[rank]}; this is a bug"
            )
    for key, start, crcs in sorted(spans, key=lambda span: span[:2]):
        if start != len(found[key]) * digests.BLOCK_NBYTES:
            raise IntegrityError(
                f"{key[0]}:{key[1]}: is written up to block {len(found[key])}, then from byte {start}; this is a bug"
            )
        found[key].extend(crcs)
    for key, crcs in found.items():
        if len(crcs) != digests.block_count(sizes[key]):
            raise IntegrityError(
                f"{key[0]}:{key[1]}: has {len(crcs)} digests; needed {digests.block_count(sizes[key])}; this is a bug"
            )
    return found
