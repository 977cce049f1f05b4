"""What of a folder is not what is proved of it, file by file and block by block. Reads every byte; writes none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from unified_ckpt.engine.repair.expected import Truth, file_nbytes, lenient
from unified_ckpt.errors import CheckpointError
from unified_ckpt.format import digests, names
from unified_ckpt.format.header import Entry
from unified_ckpt.format.manifest import FileRecord
from unified_ckpt.runtime.storage.storage import Reader

Progress = Callable[[int], object]  # called with bytes of tensors that were examined


@dataclass(slots=True)
class Fault:
    """A file that is not right, and `texts` that say how. `gone`: it is not there at all; `blocks`: (name, block) of what of a part's
    tensors is not right in it."""

    file: str
    texts: list[str]
    part: str | None = None
    gone: bool = False
    blocks: list[tuple[str, int]] = field(default_factory=list)


def examine(storage: Reader, truth: Truth, progress: Progress) -> Iterator[Fault]:
    """Every file of the manifest that is not right, in the order to mend them in."""
    for record in truth.manifest.singles():
        yield from _examine_single(storage, record.file, record.nbytes, record.crc)
    for part in truth.parts:
        for file, of in truth.manifest.parts[part].files.items():
            fault = _examine_file(storage, truth, part, file, of, progress)
            if fault.texts:
                yield fault
    for part in truth.parts:
        of_index = truth.manifest.parts[part].index
        if of_index is not None:
            yield from _examine_single(
                storage, names.index_name(part), of_index.nbytes, of_index.crc
            )


def _examine_single(storage: Reader, file: str, nbytes: int, crc: str) -> Iterator[Fault]:
    """A file that has one CRC of all its bytes."""
    size = file_nbytes(storage, file)
    if size is not None and size != nbytes:
        yield Fault(file, [f"{file}: has {size} bytes; needed {nbytes}"])
        return
    body = lenient(storage, file, nbytes) if size is not None else None
    if body is None:
        yield Fault(file, [f"{file}: is missing"], gone=True)
    elif f"{digests.crc(body):016x}" != crc:
        yield Fault(file, [f"{file}: is not the file that was written; needed CRC {crc}"])


def _examine_file(
    storage: Reader, truth: Truth, part: str, file: str, record: FileRecord, progress: Progress
) -> Fault:
    size, head = file_nbytes(storage, file), truth.heads.get(file)
    fault = Fault(file, [], part, gone=size is None)
    if size is None:
        fault.texts.append(f"{file}: is missing")
    elif size != record.nbytes:
        fault.texts.append(f"{file}: has {size} bytes; needed {record.nbytes}")
    if size is not None and (head is None or lenient(storage, file, len(head.body)) != head.body):
        fault.texts.append(f"{file}: its header is damaged; needed CRC {record.header_crc}")
    for name, entry in head.entries.items() if head is not None else ():
        for block, why in _bad_blocks(
            storage, file, entry, truth.blocks.get((part, name), ()), size or 0
        ):
            fault.blocks.append((name, block))
            if why:
                fault.texts.append(f"{file}: block {block} of {part}:{name} {why}")
        progress(entry.stop - entry.start)
    storage.close()  # one file is open at a time
    return fault


def _bad_blocks(
    storage: Reader, file: str, entry: Entry, needed: Sequence[int], size: int
) -> Iterator[tuple[int, str]]:
    """Blocks of a tensor that are not right, and why; without a word where the file ends before."""
    for block, crc in enumerate(needed):
        low = entry.start + block * digests.BLOCK_NBYTES
        body = bytearray(min(digests.BLOCK_NBYTES, entry.stop - low))
        if low + len(body) > size:
            yield block, ""
            continue
        try:
            storage.read_at(file, low, memoryview(body))
        except CheckpointError as error:
            yield block, f"cannot be read: {error}"
            continue
        if digests.crc(body) != crc:
            yield block, f"has CRC {digests.crc(body):016x}; needed {crc:016x}"
