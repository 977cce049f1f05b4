"""Compare the blocks that a load read with the saved digests, over all ranks of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.text import format_list
from unified_ckpt.engine.folder.verify import block_mismatch, read_block_crc
from unified_ckpt.engine.load.match import Match
from unified_ckpt.engine.load.read import ReadGroup, ReadStats
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import IntegrityError
from unified_ckpt.format import digests
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.storage.storage import Reader

DigestsByKey = Mapping[tuple[str, str], Sequence[int] | None]  # (part, name) -> CRC of each block


def read_saved_digests(source: Source, matches: Sequence[Match]) -> DigestsByKey:
    """Return the digests of the tensors to read. IntegrityError or FormatError if incomplete."""
    digests_by_key = source.block_digests({(match.part, match.name) for match in matches})
    for match in matches:
        saved = digests_by_key[match.part, match.name]
        expected_count = digests.block_count(match.target.decl.spec.nbytes)
        if saved is not None and len(saved) != expected_count:
            raise IntegrityError(
                f"{match.part}:{match.name}: got {len(saved)} digests, expected {expected_count}"
            )
    return digests_by_key


def verify_read(
    collective: Collective,
    reads: Sequence[tuple[ReadGroup, ReadStats]],
    by_decl: Mapping[TensorDecl, Match],
    digests_by_key: DigestsByKey,
    storage: Reader,
    *,
    mode: str,
) -> int:
    """Compare digests of blocks that the ranks read completely; return the bytes verified here.

    Collective. A block that several ranks read in pieces is combined by the group's first rank.
    With mode "full", blocks that were read in part are read again. Raises IntegrityError naming
    tensors, files and blocks.
    """
    if mode == "off":
        return 0
    mismatches: list[str] = []
    verified_nbytes = 0
    for group, stats in reads:
        by_tensor = _group_by_tensor(stats.block_crcs)
        partial_crcs: list[tuple[int, digests.BlockCrc]] = []
        for index, pieces in by_tensor.items():
            complete, partial = digests.combine_blocks(
                pieces, nbytes=group.decls[index].spec.nbytes
            )
            verified_nbytes += _compare_blocks(
                group, index, complete, by_decl, digests_by_key, mismatches
            )
            partial_crcs.extend((index, piece) for piece in pieces if piece.block in set(partial))
        if mode == "full":
            for index, blocks in _sparse_blocks(group).items():
                location, nbytes = group.locations[index], group.decls[index].spec.nbytes
                reread = {
                    block: read_block_crc(storage, location, block, nbytes) for block in blocks
                }
                verified_nbytes += _compare_blocks(
                    group, index, reread, by_decl, digests_by_key, mismatches
                )
        if group.holders[0] != collective.rank:
            collective.put(
                f"read/{group.index}/{collective.rank}", b"." + digests.serialize(partial_crcs)
            )
            continue
        for rank in group.holders[1:]:
            partial_crcs.extend(
                digests.deserialize(collective.get(f"read/{group.index}/{rank}")[1:])
            )
        partial_by_tensor = _group_by_tensor(partial_crcs)
        for index in range(len(group.decls)) if mode == "full" else list(partial_by_tensor):
            nbytes = group.decls[index].spec.nbytes
            complete, partial = digests.combine_blocks(
                partial_by_tensor.get(index, ()), nbytes=nbytes
            )
            if mode == "full":
                complete |= {
                    block: read_block_crc(storage, group.locations[index], block, nbytes)
                    for block in partial
                }
            verified_nbytes += _compare_blocks(
                group, index, complete, by_decl, digests_by_key, mismatches
            )
    if mismatches:
        raise IntegrityError(
            format_list("bytes read are not the bytes that were saved", mismatches)
        )
    return verified_nbytes


def _sparse_blocks(group: ReadGroup) -> dict[int, list[int]]:
    """Return the blocks of sparse tensors that this rank read in part, by tensor."""
    blocks: dict[int, set[int]] = {}
    runs = [
        (extent.decl_index, extent.start, extent.stop) for extent in group.reads.rank_io.extents
    ]
    runs += [
        (piece.decl_index, piece.start, piece.stop)
        for tile in group.reads.rank_io.io_tiles
        for piece in tile.ranges
    ]
    for index, start, stop in runs:
        if index in group.reads.sparse:
            blocks.setdefault(index, set()).update(
                range(start // digests.BLOCK_NBYTES, -(-stop // digests.BLOCK_NBYTES))
            )
    return {tensor_index: sorted(block_set) for tensor_index, block_set in blocks.items()}


def _group_by_tensor(
    indexed_crcs: Sequence[tuple[int, digests.BlockCrc]],
) -> dict[int, list[digests.BlockCrc]]:
    by_tensor: dict[int, list[digests.BlockCrc]] = {}
    for index, crc in indexed_crcs:
        by_tensor.setdefault(index, []).append(crc)
    return by_tensor


def _compare_blocks(
    group: ReadGroup,
    index: int,
    complete: Mapping[int, int],
    by_decl: Mapping[TensorDecl, Match],
    digests_by_key: DigestsByKey,
    mismatches: list[str],
) -> int:
    """Return the number of verified bytes; append a sentence for each mismatch."""
    if not complete:
        return 0
    decl = group.decls[index]
    match = by_decl[decl]
    saved = digests_by_key[match.part, match.name]
    if saved is None:
        return 0
    verified_nbytes = 0
    for block, crc in complete.items():
        if saved[block] == crc:
            verified_nbytes += min(
                digests.BLOCK_NBYTES, decl.spec.nbytes - block * digests.BLOCK_NBYTES
            )
        else:
            mismatches.append(
                block_mismatch(
                    match.part, match.name, group.locations[index].file, block, crc, saved[block]
                )
            )
    return verified_nbytes
