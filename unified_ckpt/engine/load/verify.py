"""Digests against bytes: of what a load has read, and of a whole folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unified_ckpt.core.sharding.declarations import Row
from unified_ckpt.core.text import listed
from unified_ckpt.engine.folder.verify import _block_text, read_block
from unified_ckpt.engine.load.match import Match
from unified_ckpt.engine.load.read import Fetched, ReadGroup
from unified_ckpt.engine.source.protocol import Catalog, Source
from unified_ckpt.errors import IntegrityError
from unified_ckpt.format import digests
from unified_ckpt.runtime.comm.collective import Meeting

Proofs = Mapping[
    tuple[str, str], Sequence[int] | None
]  # (part, name) -> CRC of each block, None where the source has none


def saved_digests(source: Source, matches: Sequence[Match]) -> Proofs:
    """The digests of the tensors that will be read. IntegrityError or FormatError where they are not all there."""
    found = source.block_digests({(match.part, match.name) for match in matches})
    for match in matches:
        saved = found[match.part, match.name]
        needed = digests.block_count(match.target.row.spec.nbytes)
        if saved is not None and len(saved) != needed:
            raise IntegrityError(
                f"{match.part}:{match.name}: has {len(saved)} digests; needed {needed}"
            )
    return found


def verify_read(
    meeting: Meeting,
    groups: Sequence[ReadGroup],
    fetched: Sequence[Fetched],
    by_row: Mapping[Row, Match],
    proofs: Proofs,
    catalog: Catalog,
    *,
    how: str,
) -> int:
    """Collective. Compares digests of the blocks that the ranks have read whole between them; returns the bytes that this rank proved.

    A block of which several ranks read pieces is joined by the group's first rank; with "full" it also reads again, whole, the blocks
    that were read in part. Raises IntegrityError naming tensors, files and blocks.
    """
    if how == "off":
        return 0
    bad: list[str] = []
    proved = 0
    for group, own in zip(groups, fetched, strict=True):
        by_tensor = _by_row(own.digested)
        loose: list[tuple[int, digests.Piece]] = []
        for number, pieces in by_tensor.items():
            whole, partial = digests.join(pieces, nbytes=group.rows[number].spec.nbytes)
            proved += _compare(group, number, whole, by_row, proofs, bad)
            loose.extend((number, piece) for piece in pieces if piece.block in set(partial))
        if how == "full":
            for number, blocks in _blocks_of_runs(group).items():
                location, nbytes = group.locations[number], group.rows[number].spec.nbytes
                again = {
                    block: read_block(catalog.storage, location, block, nbytes) for block in blocks
                }
                proved += _compare(group, number, again, by_row, proofs, bad)
        if group.holders[0] != meeting.rank:
            meeting.put(f"read/{group.index}/{meeting.rank}", b"." + digests.pack(loose))
            continue
        for rank in group.holders[1:]:
            loose.extend(digests.unpack(meeting.get(f"read/{group.index}/{rank}")[1:]))
        partly = _by_row(loose)
        for number in range(len(group.rows)) if how == "full" else list(partly):
            nbytes = group.rows[number].spec.nbytes
            whole, partial = digests.join(partly.get(number, ()), nbytes=nbytes)
            if how == "full":
                whole |= {
                    block: read_block(catalog.storage, group.locations[number], block, nbytes)
                    for block in partial
                }
            proved += _compare(group, number, whole, by_row, proofs, bad)
    if bad:
        raise IntegrityError(listed("bytes read are not the bytes that were saved", bad))
    return proved


def _blocks_of_runs(group: ReadGroup) -> dict[int, list[int]]:
    """The blocks of sparse tensors that this rank has read runs of, by row."""
    blocks: dict[int, set[int]] = {}
    runs = [(extent.row, extent.start, extent.stop) for extent in group.reads.moves.extents]
    runs += [
        (piece.row, piece.start, piece.stop)
        for tile in group.reads.moves.mine
        for piece in tile.pieces
    ]
    for row, start, stop in runs:
        if row in group.reads.sparse:
            blocks.setdefault(row, set()).update(
                range(start // digests.BLOCK_NBYTES, -(-stop // digests.BLOCK_NBYTES))
            )
    return {number: sorted(of) for number, of in blocks.items()}


def _by_row(found: Sequence[tuple[int, digests.Piece]]) -> dict[int, list[digests.Piece]]:
    by_row: dict[int, list[digests.Piece]] = {}
    for number, piece in found:
        by_row.setdefault(number, []).append(piece)
    return by_row


def _compare(
    group: ReadGroup,
    number: int,
    whole: Mapping[int, int],
    by_row: Mapping[Row, Match],
    proofs: Proofs,
    bad: list[str],
) -> int:
    """Bytes of the blocks whose digests are right; what is not goes to `bad`."""
    if not whole:
        return 0
    row = group.rows[number]
    match = by_row[row]
    saved = proofs[match.part, match.name]
    if saved is None:
        return 0
    proved = 0
    for block, crc in whole.items():
        if saved[block] == crc:
            proved += min(digests.BLOCK_NBYTES, row.spec.nbytes - block * digests.BLOCK_NBYTES)
        else:
            bad.append(
                _block_text(
                    match.part, match.name, group.locations[number].file, block, crc, saved[block]
                )
            )
    return proved
