"""Assembles blocks of a damaged folder from the shards and tensors of other nodes' folders.

Only verified blocks of those folders are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from unified_ckpt.core.nodes.node_groups import base_part, parse_shard_key
from unified_ckpt.core.sharding.boxes import Box, full_box, runs
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import memory_shape
from unified_ckpt.engine.folder.folder import Folder
from unified_ckpt.engine.folder.reader import open_folder
from unified_ckpt.engine.nodes.coverage import build_index
from unified_ckpt.engine.nodes.inventory import read_inventory
from unified_ckpt.engine.nodes.storage import ShardReader
from unified_ckpt.engine.repair.copies import Block, Notes
from unified_ckpt.errors import CheckpointError
from unified_ckpt.format import digests
from unified_ckpt.format.header import Entry
from unified_ckpt.runtime.storage.storage import Reader


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


def assemble_block(sharded: ShardReader, block: Block, notes: Notes) -> bytes | None:
    """Return a block of a tensor or shard, or None if the folders lack some of it.

    Damaged blocks of the folders are noted.
    """
    entry, body = block.entry, bytearray(block.nbytes)
    start = block.number * digests.BLOCK_NBYTES
    key, box, shape = _locate(block.part, block.name, entry)
    item_nbytes = (entry.stop - entry.start) // box.numel
    if sharded.nbytes(key) != item_nbytes * full_box(shape).numel:
        return None
    try:
        for first, low, high in _byte_runs(box, shape, item_nbytes, start, start + len(body)):
            sharded.read_into(key, first, memoryview(body)[low:high])
    except CheckpointError:
        return None
    finally:
        notes.update(dict.fromkeys(sharded.verification.damage))
    return bytes(body)


def _locate(part: str, name: str, entry: Entry) -> tuple[Key, Box, tuple[int, ...]]:
    """Return the whole tensor that a stored one belongs to, the box in it, and its shape."""
    parsed = parse_shard_key((part, name))
    shape = memory_shape(entry.dtype, entry.shape)
    if parsed is not None and parsed[1].shape == shape:
        return (base_part(part), parsed[0]), parsed[1], parsed[2]
    return (part, name), full_box(shape), shape


def _byte_runs(
    box: Box, shape: Sequence[int], item_nbytes: int, start: int, stop: int
) -> Iterator[tuple[int, int, int]]:
    """Yield where bytes [start, stop) of a box lie in the whole tensor.

    Each is (first byte in the tensor, first byte after `start`, end of these).
    """
    local, local_shape = full_box(()), box.shape
    if box.shape:  # only the rows that the range touches
        row_nbytes = item_nbytes * box.numel // box.shape[0]
        low, high = start // row_nbytes, -(-stop // row_nbytes)
        box = Box((box.offsets[0] + low, *box.offsets[1:]), (high - low, *box.shape[1:]))
        local = Box((low, *(0,) * (len(box.shape) - 1)), box.shape)
    for first, first_local, count in runs(box, shape, local=local, local_shape=local_shape):
        lower = max(first_local * item_nbytes, start)
        upper = min((first_local + count) * item_nbytes, stop)
        if lower < upper:
            yield (first - first_local) * item_nbytes + lower, lower - start, upper - start
