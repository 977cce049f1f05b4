"""The index of a file of entries, such as `rank_extra.safetensors`: offset and CRC of each entry.

The manifest verifies the index, and the index verifies the entries.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from unified_ckpt.engine.folder.stored_files import check_crc, read_range
from unified_ckpt.errors import IntegrityError
from unified_ckpt.format import digests, header
from unified_ckpt.format.header import Entry
from unified_ckpt.format.manifest_fields import EntriesFile
from unified_ckpt.runtime.storage.protocol import Reader


@dataclass(frozen=True, slots=True)
class EntriesIndex:
    """The bytes before the entries, the first byte of each entry, and the fields of the record."""

    prefix: bytes
    starts: Sequence[int]
    fields: Mapping[str, Any]


def encode_entries_index(entries: Sequence[tuple[int, int]]) -> EntriesIndex | None:
    """Lay out a file for entries of these (bytes, CRC); None if all are empty."""
    count, total = len(entries), sum(nbytes for nbytes, _ in entries)
    if not total:
        return None
    offsets = list(accumulate((nbytes for nbytes, _ in entries), initial=0))
    sections = [("crcs", "U64", (count,)), ("offsets", "U64", (count + 1,))]
    header_bytes, _ = header.encode_header([*sections, ("blobs", "U8", (total,))])
    crcs = [crc for _, crc in entries]
    prefix = header_bytes + struct.pack(f"<{2 * count + 1}Q", *crcs, *offsets)
    table_crc = digests.crc(prefix)
    blobs = [(crc, nbytes) for nbytes, crc in entries]
    crc, nbytes = digests.combine_all([(table_crc, len(prefix)), *blobs])
    fields = {
        "nbytes": nbytes,
        "header_crc": f"{digests.crc(header_bytes):016x}",
        "crc": f"{crc:016x}",
        "table_crc": f"{table_crc:016x}",
    }
    return EntriesIndex(prefix, [len(prefix) + offset for offset in offsets[:-1]], fields)


def check_entries_index(storage: Reader, record: EntriesFile, entries: Mapping[str, Entry]) -> None:
    """Raise IntegrityError if the bytes before the entries are not those that were written.

    A file of another save may hold entries that are intact.
    """
    index = read_range(storage, record.file, 0, entries["blobs"].start)
    label = f"{storage.root}/{record.file}: its index"
    check_crc(index, record.table_crc, label, consequence=": it is damaged or of another save")


def read_entry(storage: Reader, file: str, entries: Mapping[str, Entry], number: int) -> bytes:
    """Return the bytes of one entry. IntegrityError if they are not those that were written."""
    location = f"{storage.root}/{file}"
    (crc,) = _read_uint64s(storage, file, entries["crcs"], number, 1)
    low, high = _read_uint64s(storage, file, entries["offsets"], number, 2)
    blobs = entries["blobs"]
    if not low <= high <= blobs.stop - blobs.start:
        raise IntegrityError(
            f"{location}: entry {number} is bytes [{low}, {high}), expected a range "
            "within its blobs"
        )
    body = read_range(storage, file, blobs.start + low, blobs.start + high)
    if digests.crc(body) != crc:
        raise IntegrityError(
            f"{location}: entry {number} has CRC {digests.crc(body):016x}, expected {crc:016x}"
        )
    return bytes(body)


def _read_uint64s(
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
