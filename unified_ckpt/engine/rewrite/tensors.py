"""Writes a Source's whole tensors into the files of a staging folder; every rank writes its share.

In a folder, the ranks of a node divide a file by blocks, and read in the order of the source. In a
bucket, one rank writes a file whole, in the order of its bytes: it then holds a few parts of it.

How bytes could be lost: a byte is written twice or never, or a block is damaged on the way. The
ranks' shares are a pure function that every rank computes for all ranks (`plan_merge`), and the
leader merges and counts the digests of all blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import islice

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.core.planning.merge_plan import (
    MergedFile,
    file_writers,
    node_spans,
    plan_merge,
)
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import file_shape
from unified_ckpt.core.text import format_list
from unified_ckpt.engine.folder.finalize import write_outliers
from unified_ckpt.engine.folder.transaction import Transaction
from unified_ckpt.engine.plan.chunks import chunks
from unified_ckpt.engine.plan.save_plan import StagedTensors
from unified_ckpt.engine.rewrite.write_queue import WriteQueue
from unified_ckpt.engine.source.encoded import OnBytes
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import IntegrityError, StorageError
from unified_ckpt.format import digests, header, names
from unified_ckpt.format.header import Entry
from unified_ckpt.format.manifest_fields import FileRecord
from unified_ckpt.runtime.comm.topology import Topology
from unified_ckpt.runtime.storage.io_thread import IOThread
from unified_ckpt.runtime.storage.protocol import Buffer, ReadRange

# called with the number of bytes of each write; an exception ends the rewrite
OnProgress = Callable[[int], object]

RankSpan = tuple[MergedFile, Key, int, int]  # the file, and bytes [start, stop) of a tensor

_ENTRY_NBYTES = 300  # per tensor in headers, indexes and digests, without its name


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """What all ranks wrote, known on the leader: the files, and the CRCs of all blocks."""

    tensors: StagedTensors
    block_crcs: Mapping[Key, array[int]]


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rewrite that all ranks have begun.

    `sizes`: the bytes of each tensor to write. `file_plan` is the same on all ranks. `writers`: in
    a bucket, the rank that writes each file of the plan.
    """

    transaction: Transaction
    source: Source
    topology: Topology
    sizes: Mapping[Key, int]
    on_progress: OnProgress
    file_plan: Sequence[MergedFile] = ()
    writers: Sequence[int] = ()

    def spans(self) -> Iterator[tuple[int, MergedFile, Key, int, int]]:
        """Yield (rank, file, key, start, stop) for every rank, in the order of its digests."""
        if self.writers:
            yield from self._whole_spans()
            return
        ranks_by_node = self.topology.ranks_by_node
        for node in sorted({file.node for file in self.file_plan}):
            yield from self._node_spans(node, ranks_by_node[node])

    def rank_files(self) -> list[MergedFile]:
        """Return the files that this rank may write to."""
        if self.writers:
            own_rank = self.transaction.collective.rank
            planned = zip(self.writers, self.file_plan, strict=True)
            return [file for rank, file in planned if rank == own_rank]
        return [file for file in self.file_plan if file.node == self.topology.node]

    def rank_spans(self) -> list[RankSpan]:
        """Return (file, key, start, stop): the byte ranges of tensors that this rank writes."""
        topology, own_rank = self.topology, self.transaction.collective.rank
        spans = (
            self._whole_spans()
            if self.writers
            else self._node_spans(topology.node, topology.ranks_by_node[topology.node])
        )
        return [
            (file, key, start, stop) for rank, file, key, start, stop in spans if rank == own_rank
        ]

    def _whole_spans(self) -> Iterator[tuple[int, MergedFile, Key, int, int]]:
        for rank, file in zip(self.writers, self.file_plan, strict=True):
            for key in file.keys:
                if self.sizes[key]:
                    yield rank, file, key, 0, self.sizes[key]

    def _node_spans(
        self, node: int, ranks: Sequence[int]
    ) -> Iterator[tuple[int, MergedFile, Key, int, int]]:
        spans = node_spans(
            self.file_plan,
            self.sizes,
            node=node,
            count=len(ranks),
            block_nbytes=digests.BLOCK_NBYTES,
        )
        for index, span in spans:
            yield ranks[index], self.file_plan[span.file], span.key, span.start, span.stop

    def write_at(self, file: str, start: int, buffers: Sequence[Buffer]) -> None:
        """Write the buffers consecutively from byte `start` of a staged file."""
        self.transaction.storage.write_at(f"{self.transaction.folder}/{file}", start, buffers)
        self.on_progress(sum(len(buffer) for buffer in buffers))

    def encode_header(self, file: MergedFile) -> tuple[bytes, dict[str, Entry]]:
        """Return the header of a file and its entries by tensor name."""
        specs = self.source.specs(file.part, [name for _, name in file.keys])
        return header.encode_header(
            header.file_order(
                (fqn, spec.dtype, file_shape(spec.dtype, spec.shape)) for fqn, spec in specs.items()
            )
        )


def tensor_sizes(source: Source) -> dict[Key, int]:
    """Return the bytes of every tensor of the source."""
    return {key: spec.nbytes for key, spec in source.all_specs().items()}


def unwritten_names_notes(source: Source) -> list[str]:
    """Return a note on tied tensors of which a format has one name; [] without any."""
    names_by_alias = {
        f"{part}:{alias}": name
        for part in source.parts
        for alias, name in source.aliases(part).items()
    }
    title = "names of tied tensors that were not written"
    tied_names = sorted(f"{alias} ({name})" for alias, name in names_by_alias.items())
    return [format_list(title, tied_names)] if tied_names else []


def plan_files(
    rewrite: Rewrite,
    nbytes_by_node: Mapping[Key, Mapping[int, int]],
    *,
    max_file_bytes: int | None,
) -> Rewrite:
    """Collective. Return the rewrite with its file plan, which the leader makes.

    `nbytes_by_node`: on the leader, the bytes of each tensor on each node. StorageError if a rank
    of the leader's node does not see the staging folder, or if the disk lacks space.
    """
    transaction, sizes, nodes = rewrite.transaction, rewrite.sizes, rewrite.topology.nodes
    collective, leader = transaction.collective, transaction.leader
    with collective.step("check-visible"):
        try:
            transaction.check_visible()
            visible = b"1"
        except StorageError:
            if nodes[collective.rank] == nodes[leader]:
                raise
            visible = b"0"
        visibility = collective.collect(
            "sees-staging", visible, dst=leader, ranks=range(collective.world)
        )
        if transaction.is_leader:
            index_nbytes = sum(3 * len(name) + _ENTRY_NBYTES for _, name in sizes)
            transaction.check_free_space(sum(sizes.values()), index_nbytes=index_nbytes)
            blind_nodes = {nodes[rank] for rank, sees in enumerate(visibility) if sees == b"0"}
            planned_files = plan_merge(
                sizes,
                nbytes_by_node,
                writers=sorted(set(nodes) - blind_nodes),
                max_file_bytes=max_file_bytes,
            )
            collective.put_json("file-plan", [astuple(file) for file in planned_files])
    file_plan = [
        MergedFile(part, number, count, tuple((p, n) for p, n in keys), node)
        for part, number, count, keys, node in collective.get_json("file-plan")
    ]
    rewrite = replace(rewrite, file_plan=file_plan)
    return _begin_uploads(rewrite) if transaction.is_in_bucket else rewrite


def _begin_uploads(rewrite: Rewrite) -> Rewrite:
    """Collective. Return the rewrite with one writer per file, whose upload the leader begins."""
    transaction, collective = rewrite.transaction, rewrite.transaction.collective
    with collective.step("begin-uploads"):
        if transaction.is_leader:
            sizes = {
                _file_name(file): header.file_nbytes(*rewrite.encode_header(file))
                for file in rewrite.file_plan
            }
            collective.put_json("uploads", [transaction.expect_files(sizes), sizes])
        else:
            transaction.join_files(*collective.get_json("uploads"))
    ranks_by_node = rewrite.topology.ranks_by_node
    writers = file_writers(rewrite.file_plan, rewrite.sizes, ranks_by_node=ranks_by_node)
    return replace(rewrite, writers=writers)


def write_tensors(rewrite: Rewrite, on_bytes: OnBytes = lambda *_: None) -> WrittenFiles | None:
    """Write this rank's share; on the leader, return what all ranks wrote. Collective.

    `on_bytes(key, start, data)` sees the bytes of each tensor before they are written.
    """
    transaction, source = rewrite.transaction, rewrite.source
    collective, storage = transaction.collective, transaction.storage
    headers = {_file_name(file): rewrite.encode_header(file) for file in rewrite.rank_files()}
    spans = rewrite.rank_spans()
    crcs_by_span = {(key, start): array("Q") for _, key, start, _ in spans}
    in_order = list(_write_order(rewrite, headers, spans))
    _expect_reads(source, [span for _, next_spans in in_order for span in next_spans])
    with IOThread(ranks=rewrite.topology.local_world) as io_thread:
        queue = WriteQueue(storage, transaction.folder, io_thread)
        for header_names, next_spans in in_order:
            for name in header_names:
                body = memoryview(headers[name][0])
                queue.write(name, 0, body)
                rewrite.on_progress(len(body))
            for file, key, start, stop in next_spans:
                name, crcs = _file_name(file), crcs_by_span[key, start]
                tensor_start = headers[name][1][key[1]].start
                for low, high in chunks(start, stop):
                    collective.heartbeat()
                    data = queue.next_buffer(high - low)
                    source.read_into(key, low, data)
                    on_bytes(key, low, data)
                    crcs.extend(block.crc for block in digests.block_crcs(data, start=low))
                    queue.write(name, tensor_start + low, data)
                    rewrite.on_progress(len(data))
        queue.drain()
    storage.sync_written(lambda: rewrite.on_progress(0))
    transaction.collect_uploads()
    packed = b"." + b"".join(crcs_by_span[key, start].tobytes() for _, key, start, _ in spans)
    packed_by_rank = collective.collect(
        "digests", packed, dst=transaction.leader, ranks=range(collective.world)
    )
    return _collect_written(rewrite, packed_by_rank) if transaction.is_leader else None


def _write_order(
    rewrite: Rewrite,
    headers: Mapping[str, tuple[bytes, Mapping[str, Entry]]],
    spans: Sequence[RankSpan],
) -> Iterator[tuple[Collection[str], Sequence[RankSpan]]]:
    """Yield names of files whose header this rank writes, and the spans that it then writes."""
    if rewrite.writers:
        spans_by_file = group_by_value((span, _file_name(span[0])) for span in spans)
        for name, (_, entries) in headers.items():
            starts = {fqn: entry.start for fqn, entry in entries.items()}
            file_spans = spans_by_file.get(name, [])
            yield [name], sorted(file_spans, key=lambda span: starts[span[1][1]])
        return
    source = rewrite.source
    read_order = {
        (part, name): number
        for part in source.parts
        for number, name in enumerate(source.names(part))
    }
    in_order = sorted(spans, key=lambda span: (span[1][0], read_order[span[1]]))
    yield (headers if rewrite.topology.is_node_leader else ()), in_order


def _expect_reads(source: Source, spans: Sequence[RankSpan]) -> None:
    """Announce the bytes that lie plainly in files, in the order in which they are read."""
    locations = source.locations({key for _, key, _, _ in spans})
    if locations is not None:
        by_key = locations.by_key
        locations.storage.expect(
            ReadRange(by_key[key].file, by_key[key].start + start, by_key[key].start + stop)
            for _, key, start, stop in spans
            if key in by_key
        )


def _file_name(file: MergedFile) -> str:
    return names.file_name(file.part, number=file.number, count=file.count)


def _collect_written(rewrite: Rewrite, packed_by_rank: Sequence[bytes]) -> WrittenFiles:
    """StorageError if the leader sees a file with another size than was written."""
    storage, folder = rewrite.transaction.storage, rewrite.transaction.folder
    weight_maps: dict[str, dict[str, str]] = {}
    records: dict[str, dict[str, FileRecord]] = {}
    part_nbytes = dict.fromkeys(rewrite.source.parts, 0)
    for file in rewrite.file_plan:
        name = _file_name(file)
        header_bytes, entries = rewrite.encode_header(file)
        nbytes = header.file_nbytes(header_bytes, entries)
        if (size := storage.size(f"{folder}/{name}")) != nbytes:
            raise StorageError(
                f"{storage.path(folder)}/{name}: this rank sees {size} bytes, but {nbytes} "
                "were written"
            )
        header_crc = f"{digests.crc(header_bytes):016x}"
        record = FileRecord(nbytes=nbytes, header_crc=header_crc)
        records.setdefault(file.part, {})[name] = record
        weight_maps.setdefault(file.part, {}).update((fqn, name) for _, fqn in file.keys)
        part_nbytes[file.part] += sum(rewrite.sizes[key] for key in file.keys)
    source, encodings = rewrite.source, rewrite.source.encodings()
    outliers = {part: body for part in encodings if (body := source.outliers(part)) is not None}
    tensors = StagedTensors(
        weight_maps,
        records,
        part_nbytes,
        encodings,
        write_outliers(rewrite.transaction, outliers),
    )
    return WrittenFiles(tensors, _merge_digests(rewrite, packed_by_rank))


def _merge_digests(rewrite: Rewrite, packed_by_rank: Sequence[bytes]) -> dict[Key, array[int]]:
    """Return the CRCs of every block of every tensor, from what each rank sent for its spans.

    IntegrityError if there are too few or too many.
    """
    crcs_by_key = {key: array("Q") for key in sorted(rewrite.sizes)}
    unread = [iter(array("Q", packed[1:])) for packed in packed_by_rank]
    crcs_by_span: dict[tuple[Key, int], array[int]] = {}
    for rank, _, key, start, stop in rewrite.spans():
        count = digests.block_count(stop - start)
        crcs_by_span[key, start] = array("Q", islice(unread[rank], count))
    for (key, _), crcs in sorted(crcs_by_span.items()):
        crcs_by_key[key].extend(crcs)
    surplus = any(next(crcs, None) is not None for crcs in unread)
    for key, crcs in crcs_by_key.items():
        if surplus or len(crcs) != digests.block_count(rewrite.sizes[key]):
            raise IntegrityError(
                f"{key[0]}:{key[1]}: got {len(crcs)} digests, expected "
                f"{digests.block_count(rewrite.sizes[key])}; this is a bug"
            )
    return crcs_by_key
