"""What a checkpoint that is made of another one holds beside tensors, said anew: extra state, each rank's own, digests, indexes.

Runs on the one rank that leads. All of it comes from what is rewritten: nothing is made up.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import short
from unified_ckpt.engine.folder import commit, extra_state
from unified_ckpt.engine.folder.copy import Copy
from unified_ckpt.engine.nodes.source import Joint
from unified_ckpt.engine.rewrite.tensors import Output, Written
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
from unified_ckpt.runtime.storage.storage import LocalStorage


def world_of(manifest: Manifest) -> int:
    """The ranks of the whole save."""
    return manifest.island.world_size if manifest.island is not None else manifest.world_size


def reseal(
    joint: Joint,
    storage: LocalStorage,
    folder: str,
    output: Output,
    written: Written,
    *,
    fsync: bool,
) -> Manifest:
    """Of folders that are merged: writes all but tensors and the manifest, which it returns."""
    manifests, notes = joint.manifests, joint.storage.ledger.damage
    first = manifests[0]
    ours = {
        names.MANIFEST,
        commit.PROBE,
        names.DIGESTS,
        names.EXTRA,
        names.RANK_EXTRA,
        names.REPLICAS,
    }
    ours |= {file for one in manifests for file in one.files()}
    ours |= {
        file for part, files in written.records.items() for file in (*files, names.index_name(part))
    }
    # What `attach` added: it was called for each folder, with the same result.
    Copy(joint.here[0], storage, folder, fsync=fsync, beat=output.beat).others("", ours)
    world = 0
    if any(one.rank_extra is not None for one in manifests):
        world = world_of(first)
        try:
            _check_all_here(joint, world=world)
        except IncompleteError as error:
            notes.append(_without_rank_extra(world, error))
            world = 0
    fields = seal_anew(
        joint,
        storage,
        folder,
        output,
        written,
        has_optimizer=first.optimizer is not None,
        empty_parts=_empty_parts(manifests),
        rank_extras=world,
        notes=notes,
        fsync=fsync,
    )
    return first.model_copy(update={**fields, "world_size": world_of(first), "island": None})


def seal_anew(
    source: Source,
    storage: LocalStorage,
    folder: str,
    output: Output,
    written: Written,
    *,
    has_optimizer: bool,
    empty_parts: Collection[str],
    rank_extras: int,
    notes: list[str],
    fsync: bool,
) -> dict[str, Any]:
    """Writes extra state, digests and indexes; the fields of the manifest that speak of them and of the parts.

    `empty_parts`: named with no files. `rank_extras`: of how many ranks the source has one; where one is lost, there is none, and `notes`
    says so.
    """
    said = source.said()
    names_of = {part: source.names(part) for part in source.parts}
    part_nbytes = {
        part: sum(spec.nbytes for spec in source.specs(part, of).values())
        for part, of in names_of.items()
    }
    indexes = write_indexes(written, output, part_nbytes)
    parts = {
        part: Part(
            files=dict(written.records.get(part, {})),
            index=indexes.get(part),
            total_nbytes=part_nbytes.get(part, 0),
            aliases=dict(source.aliases(part)),
        )
        for part in sorted({*source.parts, *empty_parts})
    }
    told = extra_state.Told(
        modules=dict(said.modules),
        groups=[dict(group) for group in said.groups],
        scalars={fqn: dict(state) for fqn, state in said.scalars.items()},
        has_optimizer=has_optimizer,
    )
    extra = extra_state.write_extra(storage, folder, said.extra, told)
    if fsync and extra.file is not None:
        storage.sync(f"{folder}/{extra.file.file}")
    rank_extra = _write_rank_extra(source, output, world=rank_extras, notes=notes)
    proof = _write_digests(written.blocks, output)
    output.flush()
    of_files = {
        "format_version": FORMAT_VERSION,
        "parts": parts,
        "digests": proof,
        "extra_file": extra.file,
        "rank_extra": rank_extra,
    }
    of_tree = {"modules": extra.modules, "extra": extra.extra, "objects": list(said.objects)}
    return {**of_files, **of_tree, "optimizer": extra.optimizer}


def write_indexes(
    written: Written, output: Output, part_nbytes: Mapping[str, int]
) -> dict[str, IndexFile]:
    """One index for each part that has tensors; the records by part."""
    records = {}
    for part, weight_map in written.weight_maps.items():
        body = index.encode_index(total_size=part_nbytes[part], weight_map=weight_map)
        output.write_at(names.index_name(part), 0, [memoryview(body)])
        records[part] = IndexFile.of(body)
    return records


def _empty_parts(manifests: Sequence[Manifest]) -> set[str]:
    """Parts that were asked for and have no tensor anywhere. One that was deleted from all folders is none of them."""
    named = {part for one in manifests for part, record in one.parts.items() if not record.files}
    return {
        part
        for part in named
        if not any(one.island is not None and part in one.island.totals for one in manifests)
    }


def _write_rank_extra(
    source: Source, output: Output, *, world: int, notes: list[str]
) -> RankExtraFile | None:
    """Each rank's value at its place in one file. Reads each twice, to hold one at a time.

    None, with a word of it, where that of any rank is lost: some ranks would go on from their own state, and others from none.
    """
    sizes: list[tuple[int, int]] = []
    ledger = source.catalog(()).ledger
    damage = list(ledger.damage) if ledger is not None else []
    try:
        for rank in range(world):
            packed = _packed(source, rank)
            if not packed and ledger is not None and len(ledger.damage) > len(damage):
                raise IncompleteError(ledger.damage[-1])
            sizes.append((len(packed), digests.crc(packed)))
            output.beat(0)
    except (IncompleteError, IntegrityError) as error:
        notes.append(_without_rank_extra(world, error))
        return None
    total = sum(nbytes for nbytes, _ in sizes)
    if not total:
        return None
    words = [("crcs", "U64", (world,)), ("offsets", "U64", (world + 1,)), ("blobs", "U8", (total,))]
    head, _ = header.encode_header(words)
    offsets = [0]
    for nbytes, _ in sizes:
        offsets.append(offsets[-1] + nbytes)
    front = head + struct.pack(f"<{world + len(offsets)}Q", *(crc for _, crc in sizes), *offsets)
    output.write_at(names.RANK_EXTRA, 0, [memoryview(front)])
    for rank in range(world):
        if sizes[rank][0]:
            output.write_at(
                names.RANK_EXTRA, len(front) + offsets[rank], [memoryview(_packed(source, rank))]
            )
    crc, nbytes = digests.combine_stream(
        [(digests.crc(front), len(front)), *((crc, nbytes) for nbytes, crc in sizes)]
    )
    return RankExtraFile(
        file=names.RANK_EXTRA,
        nbytes=nbytes,
        header_crc=f"{digests.crc(head):016x}",
        crc=f"{crc:016x}",
        world_size=world,
        table_crc=f"{digests.crc(front):016x}",
    )


def _without_rank_extra(world: int, error: Exception) -> str:
    return f"without rank_extra, that of all {world} ranks: {error}"


def _check_all_here(joint: Joint, *, world: int) -> None:
    here = {
        rank
        for one in joint.manifests
        for rank in (one.island.ranks if one.island else range(one.world_size))
    }
    away = sorted(set(range(world)) - here)
    if away:
        raise IncompleteError(
            f"that of rank(s) {short(away)} is in a folder that is on no machine here"
        )


def _packed(source: Source, rank: int) -> bytes:
    found = source.rank_extra(rank)
    return b"" if found is None else codec.pack(found, "rank_extra")


def _write_digests(blocks: Mapping[Key, array[int]], output: Output) -> DigestFile:
    head, _ = header.encode_header(
        [(f"{part}:{name}", "U64", (len(crcs),)) for (part, name), crcs in blocks.items()]
    )
    views = [
        memoryview(head),
        *(memoryview(struct.pack(f"<{len(crcs)}Q", *crcs)) for crcs in blocks.values()),
    ]
    output.write_at(names.DIGESTS, 0, views)
    crc, nbytes = digests.combine_stream((digests.crc(view), len(view)) for view in views)
    return DigestFile(
        file=names.DIGESTS,
        algorithm=digests.ALGORITHM,
        block_nbytes=digests.BLOCK_NBYTES,
        nbytes=nbytes,
        crc=f"{crc:016x}",
    )
