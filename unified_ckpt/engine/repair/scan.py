"""Finds what in a folder differs from what is expected, by file and block. Writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from unified_ckpt.engine.repair.expected import Expected, file_nbytes, read_or_zeros
from unified_ckpt.errors import CheckpointError
from unified_ckpt.format import digests, names
from unified_ckpt.format.header import Entry
from unified_ckpt.format.manifest import FileRecord
from unified_ckpt.runtime.storage.storage import Reader

Progress = Callable[[int], object]  # called with the bytes of tensors that were scanned


@dataclass(slots=True)
class Damage:
    """A damaged file.

    `missing`: it does not exist. `blocks`: damaged (name, block) of a part's tensors.
    """

    file: str
    messages: list[str]
    part: str | None = None
    missing: bool = False
    blocks: list[tuple[str, int]] = field(default_factory=list)


def scan_folder(storage: Reader, expected: Expected, progress: Progress) -> Iterator[Damage]:
    """Yield every damaged file of the manifest, in the order to repair them."""
    for record in expected.manifest.auxiliary_files():
        yield from _scan_auxiliary_file(storage, record.file, record.nbytes, record.crc)
    for part in expected.parts:
        for file, file_record in expected.manifest.parts[part].files.items():
            damage = _scan_part_file(storage, expected, part, file, file_record, progress)
            if damage.messages:
                yield damage
    for part in expected.parts:
        index_record = expected.manifest.parts[part].index
        if index_record is not None:
            yield from _scan_auxiliary_file(
                storage, names.index_name(part), index_record.nbytes, index_record.crc
            )


def _scan_auxiliary_file(storage: Reader, file: str, nbytes: int, crc: str) -> Iterator[Damage]:
    """Check a file that has one CRC of all its bytes."""
    size = file_nbytes(storage, file)
    if size is not None and size != nbytes:
        yield Damage(file, [f"{file}: got {size} bytes, expected {nbytes}"])
        return
    body = read_or_zeros(storage, file, nbytes) if size is not None else None
    if body is None:
        yield Damage(file, [f"{file}: is missing"], missing=True)
    elif f"{digests.crc(body):016x}" != crc:
        yield Damage(file, [f"{file}: is not the file that was written, expected CRC {crc}"])


def _scan_part_file(
    storage: Reader,
    expected: Expected,
    part: str,
    file: str,
    record: FileRecord,
    progress: Progress,
) -> Damage:
    size, file_header = file_nbytes(storage, file), expected.headers.get(file)
    damage = Damage(file, [], part, missing=size is None)
    if size is None:
        damage.messages.append(f"{file}: is missing")
    elif size != record.nbytes:
        damage.messages.append(f"{file}: got {size} bytes, expected {record.nbytes}")
    if size is not None and (
        file_header is None
        or read_or_zeros(storage, file, len(file_header.body)) != file_header.body
    ):
        damage.messages.append(f"{file}: header is damaged, expected CRC {record.header_crc}")
    for name, entry in file_header.entries.items() if file_header is not None else ():
        for block, reason in _bad_blocks(
            storage, file, entry, expected.block_crcs.get((part, name), ()), size or 0
        ):
            damage.blocks.append((name, block))
            if reason:
                damage.messages.append(f"{file}: block {block} of {part}:{name} {reason}")
        progress(entry.stop - entry.start)
    storage.close()  # one file is open at a time
    return damage


def _bad_blocks(
    storage: Reader, file: str, entry: Entry, expected_crcs: Sequence[int], size: int
) -> Iterator[tuple[int, str]]:
    """Yield damaged blocks and the reason, which is empty where the file is too short."""
    for block, crc in enumerate(expected_crcs):
        offset = entry.start + block * digests.BLOCK_NBYTES
        body = bytearray(min(digests.BLOCK_NBYTES, entry.stop - offset))
        if offset + len(body) > size:
            yield block, ""
            continue
        try:
            storage.read_at(file, offset, memoryview(body))
        except CheckpointError as error:
            yield block, f"cannot be read: {error}"
            continue
        if digests.crc(body) != crc:
            yield block, f"has CRC {digests.crc(body):016x}, expected {crc:016x}"
