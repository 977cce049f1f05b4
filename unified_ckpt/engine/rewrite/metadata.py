"""Writes what a rewritten checkpoint holds beside tensors: state, digests, indexes.

Runs on the leader only. Everything comes from the source that is rewritten.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import format_ranks
from unified_ckpt.engine.folder import extra_state
from unified_ckpt.engine.folder.copy import FolderCopier
from unified_ckpt.engine.nodes.source import ClusterSource
from unified_ckpt.engine.rewrite.tensors import Output, WrittenFiles
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import IncompleteError, IntegrityError
from unified_ckpt.format import codec, digests, header, index, names
from unified_ckpt.format.manifest import (
    FORMAT_VERSION,
    DigestFile,
    IndexFile,
    Manifest,
    Part,
    RankExtraFile,
)


def full_world_size(manifest: Manifest) -> int:
    """Return the number of ranks of the whole save."""
    return (
        manifest.node_group.world_size if manifest.node_group is not None else manifest.world_size
    )


def write_merged_metadata(source: ClusterSource, output: Output, written: WrittenFiles) -> Manifest:
    """Write everything but tensors and manifest for a merge; return the manifest to write."""
    manifests, notes = source.manifests, source.storage.verification_log.damage
    first_manifest = manifests[0]
    engine_files = {
        names.MANIFEST,
        names.MARKER,
        names.DIGESTS,
        names.EXTRA,
        names.RANK_EXTRA,
        names.REPLICAS,
    }
    engine_files |= {file for manifest in manifests for file in manifest.files()}
    engine_files |= {
        file
        for part, files in written.file_records.items()
        for file in (*files, names.index_name(part))
    }
    # Files that `attach` added; it added the same ones to every folder.
    FolderCopier(
        source.local_folders[0],
        output.storage,
        output.folder,
        fsync=output.fsync,
        on_progress=output.on_progress,
    ).copy_extra_files("", engine_files)
    world_size = full_world_size(first_manifest)
    rank_extra = None
    if any(manifest.rank_extra is not None for manifest in manifests):
        try:
            _check_all_ranks_present(source, world_size=world_size)
        except IncompleteError as error:
            notes.append(_no_rank_extra_note(world_size, error))
        else:
            rank_extra = write_rank_extra(source, output, world_size=world_size, notes=notes)
    manifest_fields = write_metadata(
        source,
        output,
        written,
        has_optimizer=first_manifest.optimizer is not None,
        empty_parts=_empty_parts(manifests),
        rank_extra=rank_extra,
    )
    return first_manifest.model_copy(
        update={**manifest_fields, "world_size": world_size, "node_group": None}
    )


def write_metadata(
    source: Source,
    output: Output,
    written: WrittenFiles,
    *,
    has_optimizer: bool,
    empty_parts: Collection[str],
    rank_extra: RankExtraFile | None,
) -> dict[str, Any]:
    """Write extra state, digests and indexes; return the manifest fields of all but the header.

    `empty_parts` are listed without files. `rank_extra` is the file that `write_rank_extra` wrote.
    """
    metadata = source.metadata()
    names_by_part = {part: source.names(part) for part in source.parts}
    part_nbytes = {
        part: sum(spec.nbytes for spec in source.specs(part, part_names).values())
        for part, part_names in names_by_part.items()
    }
    indexes = write_indexes(written, output, part_nbytes)
    parts = {
        part: Part(
            files=dict(written.file_records.get(part, {})),
            index=indexes.get(part),
            total_nbytes=part_nbytes.get(part, 0),
            aliases=dict(source.aliases(part)),
        )
        for part in sorted({*source.parts, *empty_parts})
    }
    non_tensor_state = extra_state.NonTensorState(
        modules=dict(metadata.modules),
        groups=[dict(group) for group in metadata.groups],
        scalars={fqn: dict(state) for fqn, state in metadata.scalars.items()},
        has_optimizer=has_optimizer,
    )
    extra = extra_state.write_extra(output.storage, output.folder, metadata.extra, non_tensor_state)
    if output.fsync and extra.file is not None:
        output.storage.sync(f"{output.folder}/{extra.file.file}")
    digest_file = _write_digests(written.block_crcs, output)
    output.flush()
    return {
        "format_version": FORMAT_VERSION,
        "parts": parts,
        "digests": digest_file,
        "extra_file": extra.file,
        "rank_extra": rank_extra,
        "modules": extra.modules,
        "extra": extra.extra,
        "objects": list(metadata.objects),
        "optimizer": extra.optimizer,
    }


def write_indexes(
    written: WrittenFiles, output: Output, part_nbytes: Mapping[str, int]
) -> dict[str, IndexFile]:
    """Write one index for each part that has tensors; return the index records by part."""
    records = {}
    for part, weight_map in written.weight_maps.items():
        body = index.encode_index(total_size=part_nbytes[part], weight_map=weight_map)
        output.write_at(names.index_name(part), 0, [memoryview(body)])
        records[part] = IndexFile.from_bytes(body)
    return records


def _empty_parts(manifests: Sequence[Manifest]) -> set[str]:
    """Parts that were saved without any tensor, except parts that were deleted from all folders."""
    candidates = {
        part
        for manifest in manifests
        for part, record in manifest.parts.items()
        if not record.files
    }
    return {
        part
        for part in candidates
        if not any(
            manifest.node_group is not None and part in manifest.node_group.totals
            for manifest in manifests
        )
    }


def write_rank_extra(
    source: Source, output: Output, *, world_size: int, notes: list[str]
) -> RankExtraFile | None:
    """Write each rank's value into one file; return None if no rank has one.

    Reads each value twice, to hold one at a time.

    If any rank's value is lost, writes nothing and adds a note: otherwise some ranks would resume
    from their own state and others from none. The caller flushes `output`.
    """
    sizes: list[tuple[int, int]] = []
    log = source.catalog(()).verification_log
    damage_before = list(log.damage) if log is not None else []
    try:
        for rank in range(world_size):
            encoded = _encode_rank_extra(source, rank)
            if not encoded and log is not None and len(log.damage) > len(damage_before):
                raise IncompleteError(log.damage[-1])
            sizes.append((len(encoded), digests.crc(encoded)))
            output.on_progress(0)
    except (IncompleteError, IntegrityError) as error:
        notes.append(_no_rank_extra_note(world_size, error))
        return None
    total = sum(nbytes for nbytes, _ in sizes)
    if not total:
        return None
    arrays = [
        ("crcs", "U64", (world_size,)),
        ("offsets", "U64", (world_size + 1,)),
        ("blobs", "U8", (total,)),
    ]
    header_bytes, _ = header.encode_header(arrays)
    offsets = [0]
    for nbytes, _ in sizes:
        offsets.append(offsets[-1] + nbytes)
    prefix = header_bytes + struct.pack(
        f"<{world_size + len(offsets)}Q", *(crc for _, crc in sizes), *offsets
    )
    output.write_at(names.RANK_EXTRA, 0, [memoryview(prefix)])
    for rank in range(world_size):
        if sizes[rank][0]:
            output.write_at(
                names.RANK_EXTRA,
                len(prefix) + offsets[rank],
                [memoryview(_encode_rank_extra(source, rank))],
            )
    crc, nbytes = digests.combine_all(
        [(digests.crc(prefix), len(prefix)), *((crc, nbytes) for nbytes, crc in sizes)]
    )
    return RankExtraFile(
        file=names.RANK_EXTRA,
        nbytes=nbytes,
        header_crc=f"{digests.crc(header_bytes):016x}",
        crc=f"{crc:016x}",
        world_size=world_size,
        table_crc=f"{digests.crc(prefix):016x}",
    )


def _no_rank_extra_note(world_size: int, error: Exception) -> str:
    return f"rank_extra of all {world_size} ranks was left out: {error}"


def _check_all_ranks_present(source: ClusterSource, *, world_size: int) -> None:
    present = {
        rank
        for manifest in source.manifests
        for rank in (
            manifest.node_group.ranks if manifest.node_group else range(manifest.world_size)
        )
    }
    missing = sorted(set(range(world_size)) - present)
    if missing:
        raise IncompleteError(f"no node here has the folder of rank(s) {format_ranks(missing)}")


def _encode_rank_extra(source: Source, rank: int) -> bytes:
    value = source.rank_extra(rank)
    return b"" if value is None else codec.pack(value, "rank_extra")


def _write_digests(blocks: Mapping[Key, array[int]], output: Output) -> DigestFile:
    header_bytes, _ = header.encode_header(
        [(f"{part}:{name}", "U64", (len(crcs),)) for (part, name), crcs in blocks.items()]
    )
    views = [
        memoryview(header_bytes),
        *(memoryview(struct.pack(f"<{len(crcs)}Q", *crcs)) for crcs in blocks.values()),
    ]
    output.write_at(names.DIGESTS, 0, views)
    crc, nbytes = digests.combine_all((digests.crc(view), len(view)) for view in views)
    return DigestFile(
        file=names.DIGESTS,
        algorithm=digests.ALGORITHM,
        block_nbytes=digests.BLOCK_NBYTES,
        nbytes=nbytes,
        crc=f"{crc:016x}",
    )
