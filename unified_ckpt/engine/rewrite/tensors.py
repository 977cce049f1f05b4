"""Writes a Source's whole tensors into the files of a staging folder; every rank writes its share.

How bytes could be lost: a byte is written twice or never, or a block is damaged on the way. The
ranks' shares are a pure function that every rank computes for all ranks (`plan_merge`), and the
leader merges and counts the digests of all blocks.
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

# called with the number of bytes of each write; an exception ends the rewrite
OnProgress = Callable[[int], object]
# called with a key, a byte offset in the tensor, and the bytes there, before they are written
OnBytes = Callable[[Key, int, memoryview], object]

_CHUNK_NBYTES = 4 << 20  # read and written at a time; a multiple of the digest block


class Output:
    """All positional writes of one rank into the staging folder.

    Unlike a save, it does not start writeback early: `sync_file_range` blocks on a busy disk, and a
    rewrite uses that time to read.
    """

    def __init__(
        self, storage: LocalStorage, folder: str, *, fsync: bool, on_progress: OnProgress
    ) -> None:
        self.storage = storage
        self.folder = folder
        self.fsync = fsync
        self.on_progress = on_progress
        self._unsynced: set[str] = set()  # files with writes that are not on disk yet
        self.nbytes = 0

    def write_at(self, file: str, start: int, buffers: Sequence[Buffer]) -> None:
        """Write the buffers consecutively from byte `start`. They may be reused when it returns."""
        nbytes = sum(len(buffer) for buffer in buffers)
        self.storage.write_at(f"{self.folder}/{file}", start, buffers)
        self.nbytes += nbytes
        self._unsynced.add(file)
        self.on_progress(nbytes)

    def flush(self) -> None:
        """Return once everything written is on disk."""
        for file in sorted(self._unsynced):
            if self.fsync:
                self.storage.sync(f"{self.folder}/{file}")
            self.on_progress(0)
        self._unsynced.clear()


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """What all ranks wrote, known on the leader: weight maps, file records, CRCs of all blocks."""

    weight_maps: Mapping[str, Mapping[str, str]]
    file_records: Mapping[str, Mapping[str, FileRecord]]
    block_crcs: Mapping[Key, array[int]]


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rewrite that all ranks have begun.

    `nodes` gives the node of each rank; `sizes`, the bytes of each tensor to write.
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
        """Yield (file, key, start, stop): the byte ranges of tensors that this rank writes."""
        node = self.nodes[self.collective.rank]
        peers = self._peers(node)
        spans = rank_spans(
            self.file_plan,
            self.sizes,
            node=node,
            index=peers.index(self.collective.rank),
            count=len(peers),
            block_nbytes=digests.BLOCK_NBYTES,
        )
        for span in spans:
            yield self.file_plan[span.file], span.key, span.start, span.stop

    def all_spans(self) -> Iterator[tuple[int, Key, int, int]]:
        """Yield (rank, key, start, stop) for every rank, in the order in which that rank writes."""
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
        """Return the header of a file and its entries by tensor name."""
        specs = self.source.specs(file.part, [name for _, name in file.keys])
        return header.encode_header(
            header.file_order(
                (fqn, spec.dtype, file_shape(spec.dtype, spec.shape)) for fqn, spec in specs.items()
            )
        )

    def _peers(self, node: int) -> list[int]:
        return [rank for rank, rank_node in enumerate(self.nodes) if rank_node == node]


_ENTRY_NBYTES = 300  # per tensor in headers, indexes and digests, without its name


def check_free_space(rewrite: Rewrite) -> None:
    """StorageError if the disk lacks room for what will be written."""
    metadata_nbytes = sum(3 * len(name) + _ENTRY_NBYTES for _, name in rewrite.sizes)
    commit.check_free_space(
        rewrite.storage,
        rewrite.staging,
        sum(rewrite.sizes.values()),
        metadata_nbytes=metadata_nbytes,
    )


def tensor_sizes(source: Source) -> dict[Key, int]:
    """Return the bytes of every tensor of the source."""
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
    """On the leader: the nodes whose ranks all see the staging folder. Collective."""
    with collective.step("check-visible"):
        try:
            commit.check_visible(storage, staging)
            visible = b"1"
        except StorageError:
            if nodes[collective.rank] == nodes[leader]:
                raise
            visible = b"0"
        answers = collective.collect(
            "sees_staging", visible, dst=leader, ranks=range(collective.world)
        )
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
    """Return the files to write, planned on the leader. Collective.

    `nbytes_by_node` (bytes of each tensor on each node) and `writer_nodes` matter only on the
    leader.
    """
    with collective.step("plan-files"):
        if collective.rank == leader:
            file_plan = plan_merge(
                sizes, nbytes_by_node, writers=writer_nodes, max_file_bytes=max_file_bytes
            )
            body = json.dumps(
                [[file.part, file.number, file.count, file.keys, file.node] for file in file_plan]
            )
            collective.put("file-plan", zlib.compress(body.encode(), 1))
    entries = json.loads(zlib.decompress(collective.get("file-plan")))
    return [
        MergedFile(part, number, count, tuple((p, n) for p, n in keys), node)
        for part, number, count, keys, node in entries
    ]


def write_tensors(
    rewrite: Rewrite, output: Output, on_bytes: OnBytes | None = None
) -> WrittenFiles | None:
    """Write this rank's share; on the leader, return what all ranks wrote. Collective.

    `on_bytes(key, start, data)` sees the bytes of each tensor before they are written.
    """
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
    """Bytes [tensor_offset, tensor_offset + nbytes) of a tensor, bound for `file_offset` of a file.

    The CRCs of its blocks are appended to `crcs`.
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
    """Yield each chunk with its bytes, reading one chunk while the caller writes another.

    The bytes stay valid until the chunk after the next is requested.
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
    """StorageError if this rank sees a file with another size than was written."""
    for name, record in (
        (name, record) for files in file_records.values() for name, record in files.items()
    ):
        size = storage.size(f"{folder}/{name}")
        if size != record.nbytes:
            raise StorageError(
                f"{storage.path(folder)}/{name}: this rank sees {size} bytes, but {record.nbytes} "
                "were written"
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
    """Return the CRCs of every block of every tensor, from what each rank sent for its spans.

    IntegrityError if there are too few or too many.
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
                f"rank {rank} sent {len(crcs)} digests, expected {consumed[rank]}; this is a bug"
            )
    for key, start, crcs in sorted(spans, key=lambda span: span[:2]):
        if start != len(crcs_by_key[key]) * digests.BLOCK_NBYTES:
            raise IntegrityError(
                f"{key[0]}:{key[1]}: got a span at byte {start} after block "
                f"{len(crcs_by_key[key])}; this is a bug"
            )
        crcs_by_key[key].extend(crcs)
    for key, crcs in crcs_by_key.items():
        if len(crcs) != digests.block_count(sizes[key]):
            raise IntegrityError(
                f"{key[0]}:{key[1]}: got {len(crcs)} digests, expected "
                f"{digests.block_count(sizes[key])}; this is a bug"
            )
    return crcs_by_key
