"""The index of `rank_extra.safetensors`: offset and CRC of each entry.

The manifest verifies the index, and the index verifies the entries.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from unified_ckpt.engine.folder.stored_files import check_crc, read_range
from unified_ckpt.errors import IntegrityError
from unified_ckpt.format import digests, header, names
from unified_ckpt.format.header import Entry
from unified_ckpt.format.manifest_fields import RankExtraFile
from unified_ckpt.runtime.storage.storage import Reader


@dataclass(frozen=True, slots=True)
class RankExtraIndex:
    """The bytes before the entries, the first byte of each entry, and the record of the file."""

    prefix: bytes
    starts: Sequence[int]
    record: RankExtraFile


def encode_rank_extra_index(entries: Sequence[tuple[int, int]]) -> RankExtraIndex | None:
    """Lay out the file for entries of these (bytes, CRC) by rank; None if all are empty."""
    world_size, total = len(entries), sum(nbytes for nbytes, _ in entries)
    if not total:
        return None
    offsets = list(accumulate((nbytes for nbytes, _ in entries), initial=0))
    sections = [("crcs", "U64", (world_size,)), ("offsets", "U64", (world_size + 1,))]
    header_bytes, _ = header.encode_header([*sections, ("blobs", "U8", (total,))])
    crcs = [crc for _, crc in entries]
    prefix = header_bytes + struct.pack(f"<{2 * world_size + 1}Q", *crcs, *offsets)
    table_crc = digests.crc(prefix)
    blobs = [(crc, nbytes) for nbytes, crc in entries]
    crc, nbytes = digests.combine_all([(table_crc, len(prefix)), *blobs])
    record = RankExtraFile(
        file=names.RANK_EXTRA,
        nbytes=nbytes,
        header_crc=f"{digests.crc(header_bytes):016x}",
        crc=f"{crc:016x}",
        world_size=world_size,
        table_crc=f"{table_crc:016x}",
    )
    return RankExtraIndex(prefix, [len(prefix) + offset for offset in offsets[:-1]], record)


def check_rank_extra_index(
    storage: Reader, record: RankExtraFile, entries: Mapping[str, Entry]
) -> None:
    """Raise IntegrityError if the bytes before the entries are not those that were written.

    A file of another save may hold entries that are intact.
    """
    index = read_range(storage, record.file, 0, entries["blobs"].start)
    label = f"{storage.root}/{record.file}: its index"
    check_crc(index, record.table_crc, label, consequence=": it is damaged or of another save")


def read_uint64s(
    storage: Reader, file: str, entry: Entry, first: int, count: int
) -> tuple[int, ...]:
    """Read `count` 64-bit words of a tensor, starting with word `first`."""
    start = entry.start + 8 * first
    if start + 8 * count > entry.stop:
        raise IntegrityError(
            f"{storage.root}/{file}: its index ends at byte {entry.stop}, expected "
            f"{start + 8 * count}"
        )
    return struct.unpack(f"<{count}Q", read_range(storage, file, start, start + 8 * count))
