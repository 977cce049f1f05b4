"""What of a folder is not what is proved of it, file by file and block by block. Reads every byte; writes none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from unified_ckpt.engine.truth import Truth, lenient
from unified_ckpt.errors import CheckpointError, NotFoundError
from unified_ckpt.format import digests, index, names
from unified_ckpt.format.header import Entry
from unified_ckpt.format.manifest import FileRecord
from unified_ckpt.runtime.storage import Reader

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
    """Every file of the manifest that is not right, and indexes that do not say what the headers say; in the order to mend them in."""
    for record in truth.manifest.singles():
        size = _size(storage, record.file)
        body = lenient(storage, record.file, record.nbytes)
        if size is None or body is None:
            yield Fault(record.file, [f"{record.file}: is missing"], gone=True)
        elif size != record.nbytes:
            yield Fault(record.file, [f"{record.file}: has {size} bytes; needed {record.nbytes}"])
        elif f"{digests.crc(body):016x}" != record.crc:
            yield Fault(record.file, [f"{record.file}: is not the file that was written; needed CRC {record.crc}"])
    for part in truth.parts:
        for file, of in truth.manifest.parts[part].files.items():
            fault = _examine_file(storage, truth, part, file, of, progress)
            if fault.texts:
                yield fault
    for part in truth.parts:
        yield from _examine_index(storage, truth, part)


def held_names(truth: Truth, part: str) -> dict[str, str] | None:
    """What the part's index must say; None where a header is not known."""
    files = truth.manifest.parts[part].files
    if not truth.heads.keys() >= files.keys():
        return None
    return {name: file for file in files for name in truth.heads[file].entries}


def _examine_index(storage: Reader, truth: Truth, part: str) -> Iterator[Fault]:
    name = names.index_name(part)
    try:
        said = index.parse_index(storage.read(name), file=name).weight_map
    except NotFoundError:
        yield Fault(name, [f"{name}: is missing"], part, gone=True)
        return
    except CheckpointError as error:
        yield Fault(name, [str(error)], part)
        return
    held = held_names(truth, part)
    if held is not None and said != held:
        differ = sorted(key for key in said.keys() | held.keys() if said.get(key) != held.get(key))
        more = f" and of {len(differ) - 1} more" if len(differ) > 1 else ""
        yield Fault(name, [f"{name}: says of {differ[0]!r}{more} what the headers do not"], part)


def _examine_file(storage: Reader, truth: Truth, part: str, file: str, record: FileRecord, progress: Progress) -> Fault:
    size, head = _size(storage, file), truth.heads.get(file)
    fault = Fault(file, [], part, gone=size is None)
    if size is None:
        fault.texts.append(f"{file}: is missing")
    elif size != record.nbytes:
        fault.texts.append(f"{file}: has {size} bytes; needed {record.nbytes}")
    if size is not None and (head is None or lenient(storage, file, len(head.body)) != head.body):
        fault.texts.append(f"{file}: its header is damaged; needed CRC {record.header_crc}")
    for name, entry in head.entries.items() if head is not None else ():
        for block, why in _bad_blocks(storage, file, entry, truth.blocks.get((part, name), ()), size or 0):
            fault.blocks.append((name, block))
            if why:
                fault.texts.append(f"{file}: block {block} of {part}:{name} {why}")
        progress(entry.stop - entry.start)
    storage.close()  # one file is open at a time
    return fault


def _bad_blocks(storage: Reader, file: str, entry: Entry, needed: Sequence[int], size: int) -> Iterator[tuple[int, str]]:
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


def _size(storage: Reader, file: str) -> int | None:
    """None also for a file that the disk does not give."""
    try:
        return storage.size(file)
    except CheckpointError:
        return None
