"""The proof: block digests joined from all writers, the indexes, and the manifest, which is written last."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from unified_ckpt.engine.folder.extra_state import Extra, Told
from unified_ckpt.engine.folder.manifest import versions
from unified_ckpt.engine.plan.chunks import Digested
from unified_ckpt.engine.plan.save_plan import Book, GroupPlan
from unified_ckpt.errors import IntegrityError
from unified_ckpt.format import digests, index, names
from unified_ckpt.format.manifest import (
    DigestFile,
    IndexFile,
    IslandRecord,
    Manifest,
    Part,
    RankExtraFile,
)
from unified_ckpt.runtime.comm.collective import Meeting
from unified_ckpt.runtime.exchange.shared_files import Files
from unified_ckpt.runtime.storage.storage import LocalStorage


def write_digests(
    meeting: Meeting,
    files: Files,
    groups: Sequence[GroupPlan],
    found: Sequence[Digested],
    book: Book | None,
) -> DigestFile | None:
    """Collective. Each group's lead joins what its members digested and writes it at its place; returns the record on rank 0."""
    for group, own in zip(groups, found, strict=True):
        if group.lead != meeting.rank:
            meeting.collect(
                f"digests/{group.index}",
                b"." + digests.pack(own),
                at=group.lead,
                ranks=group.holders,
            )
    for group, own in zip(groups, found, strict=True):
        if group.lead == meeting.rank:
            told = meeting.collect(
                f"digests/{group.index}", b".", at=group.lead, ranks=group.holders
            )
            theirs = [packed[1:] for packed in told]
            section = _join(
                group, [*own, *(piece for packed in theirs for piece in digests.unpack(packed))]
            )
            files.write_at(names.DIGESTS, group.digest_start, [memoryview(section)])
            meeting.put(
                f"section/{group.index}", json.dumps([digests.crc(section), len(section)]).encode()
            )
    if book is None:
        return None
    files.write_at(names.DIGESTS, 0, [memoryview(book.digest_head)])
    sections = [json.loads(meeting.get(f"section/{i}")) for i in range(len(book.sections))]
    crc, nbytes = digests.combine_stream(
        [(digests.crc(book.digest_head), len(book.digest_head)), *sections]
    )
    return DigestFile(
        file=names.DIGESTS,
        algorithm=digests.ALGORITHM,
        block_nbytes=digests.BLOCK_NBYTES,
        nbytes=nbytes,
        crc=f"{crc:016x}",
    )


def _join(group: GroupPlan, found: Digested) -> bytes:
    """The digests of all blocks of the group's tensors, row by row. IntegrityError where a byte was digested twice or never."""
    by_row: dict[int, list[digests.Piece]] = {}
    for n, piece in found:
        by_row.setdefault(n, []).append(piece)
    blocks: list[int] = []
    for number, row in enumerate(group.rows):
        whole, partial = digests.join(by_row.get(number, ()), nbytes=row.spec.nbytes)
        count = digests.block_count(row.spec.nbytes)
        if partial or len(whole) != count:
            raise IntegrityError(
                f"{row.part}:{row.fqn}: {count - len(whole)} of {count} blocks were not written whole; this is a bug"
            )
        blocks.extend(whole[i] for i in range(count))
    return struct.pack(f"<{len(blocks)}Q", *blocks)


def write_indexes(storage: LocalStorage, folder: str, book: Book) -> dict[str, IndexFile]:
    """One index for each part, also for a part of one file; the records by part."""
    records = {}
    for part, weight_map in book.weight_maps.items():
        body = index.encode_index(total_size=book.part_nbytes[part], weight_map=weight_map)
        storage.put(f"{folder}/{names.index_name(part)}", body, fsync=False)
        records[part] = IndexFile.of(body)
    return records


def make_manifest(
    *,
    save_id: str,
    step: int | None,
    seconds: float,
    metrics: Mapping[str, float],
    world_size: int,
    mesh: Mapping[str, object],
    asked: Sequence[str],
    omitted: Sequence[str],
    book: Book,
    indexes: Mapping[str, IndexFile],
    told: Told,
    extra: Extra,
    objects: Sequence[str],
    digest_file: DigestFile | None,
    rank_extra: RankExtraFile | None,
    island: IslandRecord | None,
) -> Manifest:
    """The commit record. A part that was asked for and holds no tensor is named with no files."""
    parts = {
        part: Part(
            files=dict(book.records.get(part, {})),
            index=indexes.get(part),
            total_nbytes=book.part_nbytes.get(part, 0),
            aliases=told.aliases.get(part, {}),
        )
        for part in asked
    }
    return Manifest(
        save_id=save_id,
        step=step,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        world_size=world_size,
        seconds=round(seconds, 3),
        metrics=dict(metrics),
        versions=versions(),
        mesh=dict(mesh),
        parts=parts,
        omitted_parts=list(omitted),
        digests=digest_file,
        extra_file=extra.file,
        rank_extra=rank_extra,
        island=island,
        optimizer=extra.optimizer,
        modules=extra.modules,
        extra=extra.extra,
        objects=list(objects),
    )
