"""Whether what a manifest says is there, by the names and sizes of files alone. Starts without torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from unified_ckpt.core.nodes.node_groups import FRAGMENTS
from unified_ckpt.errors import FormatError, NotFoundError
from unified_ckpt.format import digests, header, names
from unified_ckpt.format.manifest import Manifest
from unified_ckpt.runtime.storage.storage import LocalStorage


def present(manifest: Manifest, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], str]:
    """The parts that are there, and in words what of the others is not. A part may be deleted, all of its files and its index."""
    parts, wrong = [], []
    needed: dict[str, int] = {}
    for part, record in manifest.parts.items():
        files = {file: one.nbytes for file, one in record.files.items()}
        if record.index is not None:
            files = {names.index_name(part): record.index.nbytes, **files}
        if files and not files.keys() & sizes.keys():
            continue
        parts.append(part)
        needed |= files
    needed |= {single.file: single.nbytes for single in manifest.singles()}
    for file, nbytes in needed.items():
        if file not in sizes:
            wrong.append(f"{file} is missing")
        elif sizes[file] != nbytes:
            wrong.append(f"{file} has {sizes[file]} bytes; the manifest says {nbytes}")
    if not parts and manifest.parts:
        wrong.append("all of its parts were deleted")
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return tuple(parts), f"{wrong[0]}{more}" if wrong else ""


def holds(storage: LocalStorage, name: str, manifest: Manifest, parts: Collection[str]) -> bool:
    """Whether the checkpoint `name` is complete and has these parts."""
    sizes = {
        file: nbytes
        for file in manifest.files()
        if (nbytes := storage.size(f"{name}/{file}")) is not None
    }
    there, wrong = present(manifest, sizes)
    return not wrong and {part.removesuffix(FRAGMENTS) for part in there}.issuperset(parts)


def wrong_header(storage: LocalStorage, name: str, manifest: Manifest) -> str:
    """Of a complete checkpoint: the first index or header that is not the one that was saved, in words; empty where there is none."""
    for file, of in manifest.indexes().items():
        try:
            crc = f"{digests.crc(storage.read(f'{name}/{file}')):016x}"
        except NotFoundError:  # of a part that was deleted
            continue
        if crc != of.crc:
            return f"{file}: has CRC {crc}; the manifest says {of.crc}"
    for part in manifest.parts.values():
        for file, record in part.files.items():
            where = f"{name}/{file}"
            if storage.size(where) is None:  # a part that was deleted
                continue
            first = bytearray(min(header.PREFIX_NBYTES, record.nbytes))
            storage.read_at(where, 0, memoryview(first))
            try:
                head = bytearray(header.header_nbytes(first, file_size=record.nbytes, file=file))
            except FormatError as error:
                return str(error)
            storage.read_at(where, 0, memoryview(head))
            if (crc := f"{digests.crc(head):016x}") != record.header_crc:
                return f"{file}: its header has CRC {crc}; the manifest says {record.header_crc}"
    return ""
