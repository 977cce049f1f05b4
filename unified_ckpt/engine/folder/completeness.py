"""Check whether a checkpoint is complete, by file names and sizes. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX
from unified_ckpt.errors import FormatError, NotFoundError
from unified_ckpt.format import digests, header, names
from unified_ckpt.format.manifest import Manifest
from unified_ckpt.runtime.storage.storage import LocalStorage


def present_parts(manifest: Manifest, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], str]:
    """Return the parts that are on disk, and what is missing of the others, as text.

    A part may be deleted if all its files and its index are.
    """
    parts, problems = [], []
    expected: dict[str, int] = {}
    for part, record in manifest.parts.items():
        files = {file: file_record.nbytes for file, file_record in record.files.items()}
        if record.index is not None:
            files = {names.index_name(part): record.index.nbytes, **files}
        if files and not files.keys() & sizes.keys():
            continue
        parts.append(part)
        expected |= files
    expected |= {auxiliary.file: auxiliary.nbytes for auxiliary in manifest.auxiliary_files()}
    for file, nbytes in expected.items():
        if file not in sizes:
            problems.append(f"{file} is missing")
        elif sizes[file] != nbytes:
            problems.append(f"{file} has {sizes[file]} bytes; the manifest says {nbytes}")
    if not parts and manifest.parts:
        problems.append("all of its parts were deleted")
    suffix = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return tuple(parts), f"{problems[0]}{suffix}" if problems else ""


def is_complete(
    storage: LocalStorage, name: str, manifest: Manifest, parts: Collection[str]
) -> bool:
    """Return whether a checkpoint is complete and has these parts."""
    sizes = {
        file: nbytes
        for file in manifest.files()
        if (nbytes := storage.size(f"{name}/{file}")) is not None
    }
    stored_parts, problem = present_parts(manifest, sizes)
    base_parts = {part.removesuffix(SHARD_SUFFIX) for part in stored_parts}
    return not problem and base_parts.issuperset(parts)


def header_mismatch(storage: LocalStorage, name: str, manifest: Manifest) -> str:
    """Describe the first index or header that differs from the saved one, or return "".

    Expects a complete checkpoint.
    """
    for file, index_record in manifest.indexes().items():
        try:
            crc = f"{digests.crc(storage.read(f'{name}/{file}')):016x}"
        except NotFoundError:  # the part was deleted
            continue
        if crc != index_record.crc:
            return f"{file}: has CRC {crc}; the manifest says {index_record.crc}"
    for part in manifest.parts.values():
        for file, record in part.files.items():
            path = f"{name}/{file}"
            if storage.size(path) is None:  # the part was deleted
                continue
            prefix = bytearray(min(header.PREFIX_NBYTES, record.nbytes))
            storage.read_at(path, 0, memoryview(prefix))
            try:
                head = bytearray(header.header_nbytes(prefix, file_size=record.nbytes, file=file))
            except FormatError as error:
                return str(error)
            storage.read_at(path, 0, memoryview(head))
            if (crc := f"{digests.crc(head):016x}") != record.header_crc:
                return f"{file}: its header has CRC {crc}; the manifest says {record.header_crc}"
    return ""
