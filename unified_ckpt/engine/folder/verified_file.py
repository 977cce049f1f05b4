"""Reads ranges of a file whose CRCs are recorded, compares them, and writes what was compared.

Copies and repairs call these functions. Damage would be passed on if a digest were computed anew
from what was read. So nothing here computes a record: digests, indexes and manifests are copied as
bytes, and a range that has another CRC is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.folder.stored_files import check_crc, read_header, read_range
from unified_ckpt.errors import IntegrityError
from unified_ckpt.format import digests, header
from unified_ckpt.format.header import Entry
from unified_ckpt.format.manifest_fields import FileRecord
from unified_ckpt.runtime.storage.protocol import Reader, Storage

Range = tuple[int, bytes | bytearray]  # the first byte in the file, and the bytes

_FLUSH_NBYTES = 32 << 20  # start writeback after so many bytes of a file


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a part's file, as bytes and as entries."""

    body: bytearray
    entries: Mapping[str, Entry]


@dataclass(frozen=True, slots=True)
class Block:
    """Block `number` of a tensor, `nbytes` from byte `start` of its file. `crc`: its digest."""

    part: str
    name: str
    entry: Entry
    number: int
    crc: int

    @property
    def start(self) -> int:
        """The first byte in the file."""
        return self.entry.start + self.number * digests.BLOCK_NBYTES

    @property
    def nbytes(self) -> int:
        """The size; a tensor's last block may be short."""
        return min(digests.BLOCK_NBYTES, self.entry.stop - self.start)

    def __str__(self) -> str:
        return f"block {self.number} of {self.part}:{self.name}"


def read_part_header(storage: Reader, file: str, record: FileRecord) -> Header:
    """Return the header of a part's file."""
    body = read_header(storage, file, record.nbytes, record.header_crc)
    return Header(body, header.parse_header(body, file_size=record.nbytes, file=file))


def blocks_of(
    part: str, header: Header, block_crcs: Mapping[Key, Sequence[int] | None]
) -> list[Block] | None:
    """Return the blocks of a part's file in order, or None if some have no digest."""
    blocks: list[Block] = []
    for name, entry in header.entries.items():
        crcs = block_crcs.get((part, name)) or ()
        if len(crcs) != digests.block_count(entry.stop - entry.start):
            return None
        blocks += [Block(part, name, entry, number, crc) for number, crc in enumerate(crcs)]
    return blocks


def read_block(storage: Reader, file: str, block: Block) -> bytearray:
    """Return the bytes of a block. IntegrityError unless they have its CRC."""
    body = read_range(storage, file, block.start, block.start + block.nbytes)
    check_crc(body, f"{block.crc:016x}", f"{storage.root}/{file}: {block}")
    return body


def read_whole(storage: Reader, file: str, nbytes: int, crc: str = "") -> Iterator[Range]:
    """Yield a file in bounded memory; IntegrityError at its end unless it has the CRC, if any."""
    actual = 0
    for start in range(0, max(nbytes, 1), digests.BLOCK_NBYTES):
        body = read_range(storage, file, start, min(start + digests.BLOCK_NBYTES, nbytes))
        actual = digests.crc(body, actual) if crc else 0
        yield start, body
    if crc and f"{actual:016x}" != crc:
        raise IntegrityError(
            f"{storage.root}/{file}: has CRC {actual:016x}; the manifest says {crc}"
        )


def write_ranges(
    storage: Storage, file: str, ranges: Iterable[Range], on_bytes: Callable[[int], object]
) -> None:
    """Write ranges of a new file, and sync it. `on_bytes` is called with the size of each.

    A range that `ranges` finds damaged afterwards is written, too: the caller removes the file.
    """
    flushed = 0
    for start, body in ranges:
        storage.write_at(file, start, [memoryview(body)])
        on_bytes(len(body))
        stop = start + len(body)
        if stop - flushed >= _FLUSH_NBYTES:
            storage.start_flush(file, flushed, stop - flushed)
            flushed = stop
    storage.sync(file)
    on_bytes(0)
