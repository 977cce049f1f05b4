"""Assembles blocks of a damaged folder from the shards and tensors of other nodes' folders.

Only verified blocks of those folders are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from unified_ckpt.core.sharding.boxes import Box, runs, shift
from unified_ckpt.core.sharding.dtypes import memory_shape
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.cluster.coverage import build_index
from unified_ckpt.engine.cluster.inventory import locate_stored, read_inventory
from unified_ckpt.engine.cluster.storage import ShardReader
from unified_ckpt.engine.cluster.tiling import enclosing_rows
from unified_ckpt.engine.folder.folder import Folder
from unified_ckpt.engine.folder.reader import open_folder
from unified_ckpt.engine.folder.verified_file import Block
from unified_ckpt.engine.repair.copies import Notes
from unified_ckpt.errors import CheckpointError
from unified_ckpt.format import digests
from unified_ckpt.runtime.storage.protocol import Reader


def open_shards(storages: Iterable[Reader], notes: Notes) -> ShardReader | None:
    """Return the tensors of some nodes' folders, as whole ones; None if no folder is usable.

    Folders with a damaged index and files with a damaged header are skipped and noted.
    """
    folders: list[Folder] = []
    for storage in storages:
        try:
            folders.append(open_folder(storage))
        except CheckpointError as error:
            notes[str(error)] = None
    if not folders:
        return None
    inventories = [
        read_inventory(folder, node=number, is_replica=False)
        for number, folder in enumerate(folders)
    ]
    for inventory in inventories:
        notes |= dict.fromkeys(inventory.problems)
    index = build_index(inventories)
    return ShardReader(index, folders, local=(), rotation=0, complete=False)


def assemble_block(sharded: ShardReader, block: Block, notes: Notes) -> bytearray | None:
    """Return a block of a tensor or shard, or None if the folders lack some of it.

    Damaged blocks of the folders are noted.
    """
    entry, body = block.entry, bytearray(block.nbytes)
    start = block.number * digests.BLOCK_NBYTES
    stored_shape = memory_shape(entry.dtype, entry.shape)
    key, box, shape, _ = locate_stored((block.part, block.name), stored_shape)
    item_nbytes, spec = (entry.stop - entry.start) // box.numel, TensorSpec(entry.dtype, shape)
    if sharded.nbytes(key) != spec.nbytes:
        return None
    try:
        for first, low, high in _byte_runs(box, spec, item_nbytes, start, start + len(body)):
            sharded.read_into(key, first, memoryview(body)[low:high])
    except CheckpointError:
        return None
    finally:
        notes.update(dict.fromkeys(sharded.verification.damage))
    return body


def _byte_runs(
    box: Box, spec: TensorSpec, item_nbytes: int, start: int, stop: int
) -> Iterator[tuple[int, int, int]]:
    """Yield where bytes [start, stop) of a box lie in the whole tensor.

    Each is (first byte in the tensor, first byte after `start`, end of these).
    """
    # only the rows that the range touches
    local = enclosing_rows(TensorSpec(spec.dtype, box.shape), start, stop)
    rows = shift(local, box.offsets)
    for first, first_local, count in runs(rows, spec.shape, local=local, local_shape=box.shape):
        lower = max(first_local * item_nbytes, start)
        upper = min((first_local + count) * item_nbytes, stop)
        if lower < upper:
            yield (first - first_local) * item_nbytes + lower, lower - start, upper - start
