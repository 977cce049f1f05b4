"""The table of `rank_extra.safetensors`: where each entry lies, and its CRC. The manifest proves
the table, which proves the entries.
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
    """IntegrityError where all that comes before the entries is not what was written: a file of
    another save has entries that are whole.
    """
    table = bytearray(entries["blobs"].start)
    storage.read_at(record.file, 0, memoryview(table))
    crc = f"{digests.crc(table):016x}"
    if crc != record.table_crc:
        location = f"{storage.root}/{record.file}"
        raise IntegrityError(
            f"{location}: its table has CRC {crc}; the manifest says {record.table_crc}: it is damaged, or another save's"
        )


def read_uint64s(
    storage: Reader, file: str, entry: Entry, first: int, count: int
) -> tuple[int, ...]:
    """Some of the 64-bit words of a tensor."""
    start = entry.start + 8 * first
    if start + 8 * count > entry.stop:
        raise IntegrityError(
            f"{storage.root}/{file}: a table ends at byte {entry.stop}; needed {start + 8 * count}"
        )
    buffer = bytearray(8 * count)
    storage.read_at(file, start, memoryview(buffer))
    return struct.unpack(f"<{count}Q", buffer)
