"""Writes what a rewritten checkpoint holds beside tensors: state, digests, indexes.

Runs on the leader only. Everything comes from the source that is rewritten.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.folder.entries_index import encode_entries_index
from unified_ckpt.engine.folder.finalize import StagedState
from unified_ckpt.engine.folder.non_tensor_state import MergedState, RankEntries
from unified_ckpt.engine.plan.digest_file import digest_file_record, encode_digest_header
from unified_ckpt.engine.rewrite.tensors import Rewrite, WrittenFiles
from unified_ckpt.engine.source.protocol import Source, SourceMetadata
from unified_ckpt.errors import IncompleteError, IntegrityError
from unified_ckpt.format import codec, digests, names
from unified_ckpt.format.manifest_fields import DigestFile, RankExtraFile


def write_state(
    rewrite: Rewrite,
    written: WrittenFiles,
    *,
    has_optimizer: bool,
    rank_extra: RankExtraFile | None,
) -> StagedState:
    """Write the digests, and return what the source holds beside tensors.

    `rank_extra` is the file that `write_rank_extra` wrote.
    """
    source = rewrite.source
    metadata = source.metadata()
    merged = MergedState(
        extra=metadata.extra,
        objects=metadata.objects,
        aliases={part: dict(source.aliases(part)) for part in source.parts},
        modules=dict(metadata.modules),
        groups=[dict(group) for group in metadata.groups],
        scalars={fqn: dict(state) for fqn, state in metadata.scalars.items()},
        has_optimizer=has_optimizer,
        rank_entries=_rank_entries(source, metadata),
    )
    return StagedState(merged, _write_digests(rewrite, written.block_crcs), rank_extra)


def _rank_entries(source: Source, metadata: SourceMetadata) -> RankEntries:
    """Return the values that differed between the ranks of the save."""
    rank_values = metadata.rank_values
    if rank_values is None:
        return RankEntries()
    entries = []
    for number, intervals in enumerate(rank_values.ranks):
        values = [[list(path), value] for path, value in source.rank_values(number)]
        ranks = [rank for start, stop in intervals for rank in range(start, stop)]
        entries.append((ranks, codec.pack(values, "rank_values")))
    return RankEntries(rank_values.world_size, rank_values.paths, entries)


def write_rank_extra(
    rewrite: Rewrite, *, world_size: int, notes: list[str]
) -> RankExtraFile | None:
    """Write each rank's value into one file; return None if no rank has one.

    Reads each value twice, to hold one at a time.

    If any rank's value is lost, writes nothing and adds a note: otherwise some ranks would resume
    from their own state and others from none.
    """
    source, sizes = rewrite.source, list[tuple[int, int]]()
    damage = source.verification.damage
    damage_count = len(damage)
    try:
        for rank in range(world_size):
            encoded = _encode_rank_extra(source, rank)
            if not encoded and len(damage) > damage_count:
                raise IncompleteError(damage[-1])
            sizes.append((len(encoded), digests.crc(encoded)))
            rewrite.on_progress(0)
    except (IncompleteError, IntegrityError) as error:
        notes.append(no_rank_extra_note(world_size, error))
        return None
    index = encode_entries_index(sizes)
    if index is None:
        return None
    rewrite.write_at(names.RANK_EXTRA, 0, [memoryview(index.prefix)])
    for rank, start in enumerate(index.starts):
        if sizes[rank][0]:
            encoded = _encode_rank_extra(source, rank)
            rewrite.write_at(names.RANK_EXTRA, start, [memoryview(encoded)])
    return RankExtraFile(file=names.RANK_EXTRA, world_size=world_size, **index.fields)


def no_rank_extra_note(world_size: int, reason: object) -> str:
    """Return the note about a target without the values of any rank."""
    return f"rank_extra of all {world_size} ranks was left out: {reason}"


def _encode_rank_extra(source: Source, rank: int) -> bytes:
    value = source.rank_extra(rank)
    return b"" if value is None else codec.pack(value, "rank_extra")


def _write_digests(rewrite: Rewrite, blocks: Mapping[Key, array[int]]) -> DigestFile:
    header = encode_digest_header((key, len(crcs)) for key, crcs in blocks.items())
    sections = [struct.pack(f"<{len(crcs)}Q", *crcs) for crcs in blocks.values()]
    views = [memoryview(view) for view in (header, *sections)]
    rewrite.write_at(names.DIGESTS, 0, views)
    return digest_file_record((digests.crc(view), len(view)) for view in views)
