"""Check whether a checkpoint is complete, by file names and sizes. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX
from unified_ckpt.core.text import first_items
from unified_ckpt.engine.folder.stored_files import read_file, read_header
from unified_ckpt.errors import FormatError, IntegrityError
from unified_ckpt.format import names
from unified_ckpt.format.encoded_tensors import MasterEncoding
from unified_ckpt.format.manifest import Manifest
from unified_ckpt.runtime.storage.protocol import Storage


def present_parts(manifest: Manifest, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], str]:
    """Return the parts that are on disk, and what is missing of the others, as text.

    A part may be deleted with all its files and its index; its outliers are then ignored.
    """
    parts = [part for part in manifest.parts if not manifest.is_deleted(part, sizes.__contains__)]
    present, problems = manifest.with_parts(parts), list[str]()
    for file, record in (*present.part_files(), *present.whole_files()):
        if file not in sizes:
            problems.append(f"{file} is missing")
        elif sizes[file] != record.nbytes:
            problems.append(f"{file} has {sizes[file]} bytes; the manifest says {record.nbytes}")
    problems += undecodable_parts(manifest, parts)
    if not parts and manifest.parts:
        problems.append("all of its parts were deleted")
    return tuple(parts), first_items(problems, 1)


def undecodable_parts(manifest: Manifest, parts: Collection[str]) -> list[str]:
    """Describe those of these parts that are encoded beside the model, if that was deleted."""
    if names.MODEL in parts:
        return []
    return [
        f"{part} is stored beside the part {names.MODEL}, which was deleted"
        for part in parts
        if any(e.name == MasterEncoding.name for e in manifest.parts[part].encodings.values())
    ]


def is_complete(storage: Storage, name: str, manifest: Manifest, parts: Collection[str]) -> bool:
    """Return whether a checkpoint is complete and has these parts."""
    sizes = {
        file: nbytes
        for file in manifest.files()
        if (nbytes := storage.size(f"{name}/{file}")) is not None
    }
    stored_parts, problem = present_parts(manifest, sizes)
    base_parts = {part.removesuffix(SHARD_SUFFIX) for part in stored_parts}
    return not problem and base_parts.issuperset(parts)


def header_mismatch(storage: Storage, name: str, manifest: Manifest) -> str:
    """Describe the first index or header that differs from the saved one, or return "".

    Expects a complete checkpoint.
    """
    try:
        for file, index_record in manifest.indexes().items():
            if storage.size(f"{name}/{file}") is not None:  # else the part was deleted
                read_file(storage, f"{name}/{file}", index_record)
        for file, record in manifest.part_files():
            if storage.size(f"{name}/{file}") is not None:
                read_header(storage, f"{name}/{file}", record.nbytes, record.header_crc)
    except (FormatError, IntegrityError) as error:
        return str(error).removeprefix(f"{storage.path(name)}/")
    return ""
