"""Reads files of a folder, compares their sizes and CRCs with what is recorded of them, and checks
the space for new ones.
"""

from __future__ import annotations

from unified_ckpt.core.text import human_size
from unified_ckpt.errors import CheckpointError, IncompleteError, IntegrityError, StorageError
from unified_ckpt.format import digests, header
from unified_ckpt.format.manifest_fields import DigestFile, IndexFile, NamedFile
from unified_ckpt.runtime.storage.protocol import Reader, Storage


def read_range(storage: Reader, file: str, start: int, stop: int) -> bytearray:
    """Return bytes [start, stop) of a file."""
    body = bytearray(stop - start)
    storage.read_at(file, start, memoryview(body))
    return body


def check_size(storage: Reader, file: str, nbytes: int) -> None:
    """IncompleteError or IntegrityError unless the file has this size."""
    size = storage.size(file)
    if size is None:
        raise IncompleteError(f"{storage.root}/{file}: is missing")
    if size != nbytes:
        raise IntegrityError(f"{storage.root}/{file}: has {size} bytes; the manifest says {nbytes}")


def check_crc(body: bytes | bytearray, crc: str, label: str, *, consequence: str = "") -> None:
    """IntegrityError, about what `label` names, unless the bytes have this CRC."""
    actual = f"{digests.crc(body):016x}"
    if actual != crc:
        raise IntegrityError(f"{label} has CRC {actual}; the manifest says {crc}{consequence}")


def read_file(storage: Reader, file: str, record: NamedFile | DigestFile | IndexFile) -> bytes:
    """Return the bytes of a file that has one CRC of all of them."""
    check_size(storage, file, record.nbytes)
    body = storage.read(file)
    label = f"{storage.root}/{file}: is not the file that was written:"
    check_crc(body, record.crc, label)
    return body


def read_header(storage: Reader, file: str, nbytes: int, crc: str | None) -> bytearray:
    """Return the header of a file of `nbytes`. `crc`: None if it is not recorded."""
    location = f"{storage.root}/{file}"
    prefix = read_range(storage, file, 0, min(header.PREFIX_NBYTES, nbytes))
    stop = header.header_nbytes(prefix, file_size=nbytes, file=location)
    body = read_range(storage, file, 0, stop)
    if crc is not None:
        check_crc(body, crc, f"{location}: its header", consequence=": it is of another file")
    return body


def error_text(error: CheckpointError, storage: Reader) -> str:
    """Return an error about a file of a folder as a sentence that begins with the file's name."""
    return str(error).removeprefix(f"{storage.root}/")


def check_free_space(storage: Storage, name: str, nbytes: int, content: str) -> None:
    """StorageError if the file system lacks space for a new file or folder. `content`: what the
    bytes are for.
    """
    free = storage.free_nbytes()
    if free is not None and free < nbytes:
        lacking = human_size(nbytes - free)  # the two may look alike
        raise StorageError(
            f"{storage.path(name)}: lacks {lacking} of free space: got {human_size(free)}, "
            f"expected {human_size(nbytes)} ({content}); delete files, or use another file system"
        )
