"""The tensors of a source, whole, into the files of a folder under construction: every rank writes
its share.

What could lose bytes: a byte is written twice or never; a block is damaged on the way. Shares are a
pure function that every rank computes for all ranks (`core/plan_merge.py`); the lead puts the
digests of all blocks together and counts them.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from unified_ckpt.core.planning.merge_plan import MergedFile, node_spans, plan_merge, rank_spans
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import file_shape
from unified_ckpt.engine.folder import commit
from unified_ckpt.engine.source.protocol import Catalog, Source
from unified_ckpt.errors import IntegrityError, StorageError
from unified_ckpt.format import digests, header, names
from unified_ckpt.format.header import Entry
from unified_ckpt.format.manifest import FileRecord
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.topology import first_ranks
from unified_ckpt.runtime.storage.io_thread import IOThread
from unified_ckpt.runtime.storage.storage import Buffer, LocalStorage

OnProgress = Callable[
    [int], object
]  # called with the bytes of each range that was written; what it raises ends the rewrite
OnBytes = Callable[
    [Key, int, memoryview], object
]  # called with bytes of a tensor, from which byte they are, before they are written

_CHUNK_NBYTES = 4 << 20  # read, digested and written at a time: a whole number of digest blocks


class Output:
    """All positional writes of a rank into the folder under construction.

    The kernel is not asked to begin with the disk early, as saves do: `sync_file_range` waits where
    the disk is busy, and a rewrite reads meanwhile.
    """

    def __init__(
        self, storage: LocalStorage, folder: str, *, fsync: bool, on_progress: OnProgress
    ) -> None:
        self._storage, self._folder, self._fsync, self.on_progress = (
            storage,
            folder,
            fsync,
            on_progress,
        )
        self._unsynced: set[str] = set()  # files that are not on the disk yet
        self.nbytes = 0

    def write_at(self, file: str, start: int, buffers: Sequence[Buffer]) -> None:
        """The buffers one after the other from byte `start`; they may change when it returns."""
        nbytes = sum(len(buffer) for buffer in buffers)
        self._storage.write_at(f"{self._folder}/{file}", start, buffers)
        self.nbytes += nbytes
        self._unsynced.add(file)
        self.on_progress(nbytes)

    def flush(self) -> None:
        """Returns once all that was written is on the disk."""
        for file in sorted(self._unsynced):
            if self._fsync:
                self._storage.sync(f"{self._folder}/{file}")
            self.on_progress(0)
        self._unsynced.clear()


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """What the lead knows when all is written: by part, which file has which tensor, and what each
    file is; the digests of all blocks.
    """

    weight_maps: Mapping[str, Mapping[str, str]]
    file_records: Mapping[str, Mapping[str, FileRecord]]
    block_crcs: Mapping[Key, array[int]]


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rewrite that all ranks have begun. `nodes`: the machine of each rank; `sizes`: bytes of
    each tensor that is written.
    """

    collective: Collective
    source: Source
    storage: LocalStorage
    staging: commit.StagingDir
    leader: int
    nodes: tuple[int, ...]
    file_plan: Sequence[MergedFile]
    sizes: Mapping[Key, int]

    def rank_spans(self) -> Iterator[tuple[MergedFile, Key, int, int]]:
        """What this rank writes: bytes [start, stop) of tensors."""
        node = self.nodes[self.collective.rank]
        peers = self._peers(node)
        position = {
            "node": node,
            "index": peers.index(self.collective.rank),
            "count": len(peers),
        }
        for span in rank_spans(
            self.file_plan, self.sizes, block_nbytes=digests.BLOCK_NBYTES, **position
        ):
            yield self.file_plan[span.file], span.key, span.start, span.stop

    def all_spans(self) -> Iterator[tuple[int, Key, int, int]]:
        """What each rank writes, in the order of each: rank, bytes [start, stop) of tensors."""
        for node in sorted({file.node for file in self.file_plan}):
            peers = self._peers(node)
            spans = node_spans(
                self.file_plan,
                self.sizes,
                node=node,
                count=len(peers),
                block_nbytes=digests.BLOCK_NBYTES,
            )
            for index, span in spans:
                yield peers[index], span.key, span.start, span.stop

    def encode_header(self, file: MergedFile) -> tuple[bytes, dict[str, Entry]]:
        specs = self.source.specs(file.part, [name for _, name in file.keys])
        return header.encode_header(
            header.file_order(
                (fqn, spec.dtype, file_shape(spec.dtype, spec.shape)) for fqn, spec in specs.items()
            )
        )

    def _peers(self, node: int) -> list[int]:
        return [rank for rank, rank_node in enumerate(self.nodes) if rank_node == node]


_ENTRY_NBYTES = 300  # of a tensor in headers, indexes and digests, beside its name


def check_free_space(rewrite: Rewrite) -> None:
    """StorageError where the disk has no room for what is written."""
    metadata_nbytes = sum(3 * len(name) + _ENTRY_NBYTES for _, name in rewrite.sizes)
    commit.check_free_space(
        rewrite.storage,
        rewrite.staging,
        sum(rewrite.sizes.values()),
        metadata_nbytes=metadata_nbytes,
    )


def tensor_sizes(source: Source) -> dict[Key, int]:
    return {
        (part, name): spec.nbytes
        for part in source.parts
        for name, spec in source.specs(part, source.names(part)).items()
    }


def nodes_that_see(
    collective: Collective,
    storage: LocalStorage,
    staging: commit.StagingDir,
    nodes: Sequence[int],
    *,
    leader: int,
) -> list[int]:
    """Collective. On the lead: the machines all of whose ranks see the folder under construction."""
    with collective.step("see"):
        try:
            commit.check_visible(storage, staging)
            visible = b"1"
        except StorageError:
            if nodes[collective.rank] == nodes[leader]:
                raise
            visible = b"0"
        answers = collective.collect("sees", visible, dst=leader, ranks=range(collective.world))
    blind_nodes = {nodes[rank] for rank, answer in enumerate(answers) if answer == b"0"}
    return sorted(set(nodes) - blind_nodes)


def plan_files(
    collective: Collective,
    sizes: Mapping[Key, int],
    nbytes_by_node: Mapping[Key, Mapping[int, int]],
    *,
    writer_nodes: Sequence[int],
    max_file_bytes: int,
    leader: int,
) -> list[MergedFile]:
    """Collective. `plan_merge` on the lead, told to all; `nbytes_by_node`, `writer_nodes`: the
    lead's.
    """
    with collective.step("plan"):
        if collective.rank == leader:
            file_plan = plan_merge(
                sizes, nbytes_by_node, writers=writer_nodes, max_file_bytes=max_file_bytes
            )
            body = json.dumps(
                [[file.part, file.number, file.count, file.keys, file.node] for file in file_plan]
            )
            collective.put("files", zlib.compress(body.encode(), 1))
    entries = json.loads(zlib.decompress(collective.get("files")))
    return [
        MergedFile(part, number, count, tuple((p, n) for p, n in keys), node)
        for part, number, count, keys, node in entries
    ]


def write_tensors(
    rewrite: Rewrite, output: Output, on_bytes: OnBytes | None = None
) -> WrittenFiles | None:
    """Collective. This rank's share. On the lead: what all have written."""
    collective, node = rewrite.collective, rewrite.nodes[rewrite.collective.rank]
    headers = {
        _file_name(file): rewrite.encode_header(file)
        for file in rewrite.file_plan
        if file.node == node
    }
    if collective.rank in first_ranks(rewrite.nodes):
        for name, (header_bytes, _) in headers.items():
            output.write_at(name, 0, [memoryview(header_bytes)])
    spans = list(rewrite.rank_spans())
    catalog = rewrite.source.catalog({key for _, key, _, _ in spans})
    locality = catalog.locality or {}
    span_crcs: dict[tuple[Key, int], array[int]] = {
        (key, start): array("Q") for _, key, start, _ in spans
    }

    def chunks() -> Iterator[_Chunk]:
        for file, key, start, stop in sorted(spans, key=lambda span: locality.get(span[1], "")):
            file_name = _file_name(file)
            tensor_start = headers[file_name][1][key[1]].start
            for tensor_offset in range(start, stop, _CHUNK_NBYTES):
                yield _Chunk(
                    file_name,
                    tensor_start + tensor_offset,
                    key,
                    tensor_offset,
                    min(_CHUNK_NBYTES, stop - tensor_offset),
                    span_crcs[key, start],
                )

    with IOThread(ranks=rewrite.nodes.count(node)) as io_thread:
        for chunk, data in _read_ahead(io_thread, chunks(), catalog, on_bytes):
            output.write_at(chunk.file, chunk.file_offset, [data])
    output.flush()
    packed = b"." + b"".join(span_crcs[key, start].tobytes() for _, key, start, _ in spans)
    packed_by_rank = collective.collect(
        "digests", packed, dst=rewrite.leader, ranks=range(collective.world)
    )
    return _collect_written(rewrite, packed_by_rank) if collective.rank == rewrite.leader else None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Bytes [low, low + nbytes) of a tensor, which go to byte `file_offset` of a file; `crcs` is
    where the digests of its blocks go.
    """

    file: str
    file_offset: int
    key: Key
    tensor_offset: int
    nbytes: int
    crcs: array[int]


def _read_ahead(
    io_thread: IOThread, chunks: Iterator[_Chunk], catalog: Catalog, on_bytes: OnBytes | None
) -> Iterator[tuple[_Chunk, memoryview]]:
    """Each chunk with its bytes, which change when the next but one is asked for: one is read while
    another is written.
    """
    buffers = [memoryview(bytearray(_CHUNK_NBYTES)) for _ in range(2)]

    def read(chunk: _Chunk, data: memoryview) -> None:
        location = catalog.locations[chunk.key]
        catalog.storage.read_at(location.file, location.start + chunk.tensor_offset, data)
        if on_bytes is not None:
            on_bytes(chunk.key, chunk.tensor_offset, data)
        chunk.crcs.extend(
            block.crc for block in digests.block_crcs(data, start=chunk.tensor_offset)
        )

    pending: tuple[_Chunk, memoryview, Future[None]] | None = None
    for number, chunk in enumerate(chunks):
        data = buffers[number % 2][: chunk.nbytes]
        submitted = chunk, data, io_thread.submit(partial(read, chunk, data))
        if pending is not None:
            yield _await_read(*pending)
        pending = submitted
    if pending is not None:
        yield _await_read(*pending)


def _await_read(
    chunk: _Chunk, data: memoryview, reading: Future[None]
) -> tuple[_Chunk, memoryview]:
    reading.result()
    return chunk, data


def check_sizes(
    storage: LocalStorage, folder: str, file_records: Mapping[str, Mapping[str, FileRecord]]
) -> None:
    """StorageError for a file that is not as long as was written, as this rank sees it."""
    for name, record in (
        (name, record) for files in file_records.values() for name, record in files.items()
    ):
        size = storage.size(f"{folder}/{name}")
        if size != record.nbytes:
            raise StorageError(
                f"{storage.path(folder)}/{name}: has {size} bytes as this rank sees it; {record.nbytes} were written"
            )


def _file_name(file: MergedFile) -> str:
    return names.file_name(file.part, number=file.number, count=file.count)


def _collect_written(rewrite: Rewrite, packed_by_rank: Sequence[bytes]) -> WrittenFiles:
    weight_maps: dict[str, dict[str, str]] = {}
    file_records: dict[str, dict[str, FileRecord]] = {}
    for file in rewrite.file_plan:
        header_bytes, entries = rewrite.encode_header(file)
        nbytes = max((entry.stop for entry in entries.values()), default=len(header_bytes))
        file_records.setdefault(file.part, {})[_file_name(file)] = FileRecord(
            nbytes=nbytes, header_crc=f"{digests.crc(header_bytes):016x}"
        )
        weight_maps.setdefault(file.part, {}).update(
            {name: _file_name(file) for _, name in file.keys}
        )
    return WrittenFiles(weight_maps, file_records, _merge_digests(rewrite, packed_by_rank))


def _merge_digests(rewrite: Rewrite, packed_by_rank: Sequence[bytes]) -> dict[Key, array[int]]:
    """The digests of every block of every tensor, as the ranks tell them of their shares.
    IntegrityError for one too many or too few.
    """
    sizes = rewrite.sizes
    crcs_by_key = {key: array("Q") for key in sorted(sizes)}
    crcs_by_rank = [array("Q", packed[1:]) for packed in packed_by_rank]
    consumed = [0] * len(packed_by_rank)
    spans = []
    for rank, key, start, stop in rewrite.all_spans():
        count = digests.block_count(stop - start)
        spans.append((key, start, crcs_by_rank[rank][consumed[rank] : consumed[rank] + count]))
        consumed[rank] += count
    for rank, crcs in enumerate(crcs_by_rank):
        if consumed[rank] != len(crcs):
            raise IntegrityError(
                f"rank {rank} tells {len(crcs)} digests; needed {consumed[rank]}; this is a bug"
            )
    for key, start, crcs in sorted(spans, key=lambda span: span[:2]):
        if start != len(crcs_by_key[key]) * digests.BLOCK_NBYTES:
            raise IntegrityError(
                f"{key[0]}:{key[1]}: is written up to block {len(crcs_by_key[key])}, then from byte {start}; this is a bug"
            )
        crcs_by_key[key].extend(crcs)
    for key, crcs in crcs_by_key.items():
        if len(crcs) != digests.block_count(sizes[key]):
            raise IntegrityError(
                f"{key[0]}:{key[1]}: has {len(crcs)} digests; needed {digests.block_count(sizes[key])}; this is a bug"
            )
    return crcs_by_key
