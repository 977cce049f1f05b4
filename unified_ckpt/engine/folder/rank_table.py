"""The table of `rank_extra.safetensors`: offset and CRC of each entry.

The manifest verifies the table, and the table verifies the entries.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from unified_ckpt.errors import IntegrityError
from unified_ckpt.format import digests
from unified_ckpt.format.header import Entry
from unified_ckpt.format.manifest import RankExtraFile
from unified_ckpt.runtime.storage.storage import Reader


def check_table(storage: Reader, record: RankExtraFile, entries: Mapping[str, Entry]) -> None:
    """Raise IntegrityError if the bytes before the entries are not those that were written.

    A file of another save may hold entries that are intact.
    """
    table = bytearray(entries["blobs"].start)
    storage.read_at(record.file, 0, memoryview(table))
    crc = f"{digests.crc(table):016x}"
    if crc != record.table_crc:
        location = f"{storage.root}/{record.file}"
        raise IntegrityError(
            f"{location}: its table has CRC {crc}; the manifest says {record.table_crc}: it "
            "is damaged or of another save"
        )


def read_uint64s(
    storage: Reader, file: str, entry: Entry, first: int, count: int
) -> tuple[int, ...]:
    """Read `count` 64-bit words of a tensor, starting with word `first`."""
    start = entry.start + 8 * first
    if start + 8 * count > entry.stop:
        raise IntegrityError(
            f"{storage.root}/{file}: a table ends at byte {entry.stop}, expected "
            f"{start + 8 * count}"
        )
    buffer = bytearray(8 * count)
    storage.read_at(file, start, memoryview(buffer))
    return struct.unpack(f"<{count}Q", buffer)
