"""Compare the blocks that a load read with the saved digests, over all ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence

from unified_ckpt.core.text import raise_if_any
from unified_ckpt.engine.folder.verify import block_mismatch
from unified_ckpt.engine.load.read import GroupReader, GroupReadPlan
from unified_ckpt.engine.load.tensor_reader import TensorReader
from unified_ckpt.engine.plan.chunks import group_by_tensor
from unified_ckpt.errors import IntegrityError
from unified_ckpt.format import digests
from unified_ckpt.runtime.comm.collective import Collective


def verify_read(collective: Collective, group_readers: Sequence[GroupReader], *, mode: str) -> int:
    """Compare digests of all blocks that the ranks read whole; return the bytes verified here.

    Collective. A block that several ranks read in pieces is combined by the group's first rank.
    With mode "full", blocks that were read in part are read again. Raises IntegrityError naming
    tensors, files and blocks.
    """
    if mode == "off":
        return 0
    mismatches: list[str] = []
    verified_nbytes = 0
    for group_reader in group_readers:
        plan, reader = group_reader.plan, group_reader.tensor_reader
        partial_crcs: list[tuple[int, digests.BlockCrc]] = []
        for index, pieces in group_by_tensor(group_reader.block_crcs).items():
            complete, partial = digests.combine_blocks(pieces, nbytes=plan.decls[index].spec.nbytes)
            verified_nbytes += _compare_blocks(plan, index, complete, mismatches)
            if partial:
                partial_crcs.extend((index, p) for p in pieces if p.block not in complete)
        if mode == "full":
            for index, blocks in _sparse_blocks(plan).items():
                reread = _read_blocks(plan, index, blocks, reader)
                verified_nbytes += _compare_blocks(plan, index, reread, mismatches)
        if plan.holders[0] != collective.rank:
            collective.put(
                f"read/{plan.index}/{collective.rank}", b"." + digests.serialize(partial_crcs)
            )
            continue
        for rank in plan.holders[1:]:
            partial_crcs.extend(
                digests.deserialize(collective.get(f"read/{plan.index}/{rank}")[1:])
            )
        for index, pieces in group_by_tensor(partial_crcs).items():
            complete, partial = digests.combine_blocks(pieces, nbytes=plan.decls[index].spec.nbytes)
            if mode == "full":
                complete |= _read_blocks(plan, index, partial, reader)
            verified_nbytes += _compare_blocks(plan, index, complete, mismatches)
    raise_if_any(IntegrityError, "bytes read are not the bytes that were saved", mismatches)
    return verified_nbytes


def _read_blocks(
    plan: GroupReadPlan, index: int, blocks: Sequence[int], reader: TensorReader
) -> dict[int, int]:
    """Read whole blocks of a tensor and return their CRCs."""
    crcs: dict[int, int] = {}
    for block in blocks:
        start = block * digests.BLOCK_NBYTES
        stop = min(start + digests.BLOCK_NBYTES, plan.decls[index].spec.nbytes)
        buffer = bytearray(stop - start)
        reader.read_into(plan.tensors[index], start, memoryview(buffer))
        crcs[block] = digests.crc(buffer)
    return crcs


def _sparse_blocks(plan: GroupReadPlan) -> dict[int, list[int]]:
    """Return the blocks of unexchanged tensors that this rank read in part, by tensor."""
    blocks: dict[int, set[int]] = {}
    runs = [
        (extent.decl_index, extent.start, extent.stop) for extent in plan.read_plan.rank_io.extents
    ]
    runs += [
        (piece.decl_index, piece.start, piece.stop)
        for tile in plan.read_plan.rank_io.io_tiles
        for piece in tile.ranges
    ]
    runs += [(read.decl_index, read.start, read.stop) for read in plan.box_reads]
    for index, start, stop in runs:
        if index in plan.read_plan.unexchanged and plan.tensors[index].block_crcs is not None:
            blocks.setdefault(index, set()).update(
                range(start // digests.BLOCK_NBYTES, -(-stop // digests.BLOCK_NBYTES))
            )
    return {tensor_index: sorted(block_set) for tensor_index, block_set in blocks.items()}


def _compare_blocks(
    plan: GroupReadPlan, index: int, complete: dict[int, int], mismatches: list[str]
) -> int:
    """Return the number of verified bytes; append a sentence for each mismatch."""
    tensor, nbytes = plan.tensors[index], plan.decls[index].spec.nbytes
    assert tensor.block_crcs is not None  # of other tensors no block has a CRC
    verified_nbytes = 0
    for block, crc in complete.items():
        if tensor.block_crcs[block] == crc:
            verified_nbytes += min(digests.BLOCK_NBYTES, nbytes - block * digests.BLOCK_NBYTES)
        else:
            mismatches.append(
                block_mismatch(
                    *tensor.key, tensor.location.file, block, crc, tensor.block_crcs[block]
                )
            )
    return verified_nbytes
