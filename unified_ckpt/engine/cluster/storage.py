"""Read tensors that are split into shards in several folders as if they were whole.

Knows of nodes only which folders are local. Every block that is read is verified unless
verification is switched off.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice

import numpy as np

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.core.nodes.coverage import subtract_box
from unified_ckpt.core.nodes.write_alignment import is_slow
from unified_ckpt.core.sharding.boxes import Box, full_box, intersect, relative_to, runs
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import format_list
from unified_ckpt.engine.cluster.coverage import ClusterIndex, ShardLayout
from unified_ckpt.engine.cluster.folders import FolderCache
from unified_ckpt.engine.cluster.locations import LocationTable
from unified_ckpt.engine.cluster.tiling import (
    LONG_RUN_NBYTES,
    Region,
    ShardCopies,
    SlabRange,
    enclosing_rows,
    slab_range_of,
    snap_to_edges,
    split_by_block,
    split_whole_rows,
)
from unified_ckpt.engine.folder.folder import Folder
from unified_ckpt.engine.source.protocol import ReadPolicy, VerificationLog
from unified_ckpt.errors import CheckpointError, IntegrityError
from unified_ckpt.format import digests
from unified_ckpt.runtime.storage.protocol import Buffer

_LOG = logging.getLogger("unified_ckpt")
_MAX_BLOCKS = 256  # cached at a time
_CACHE_PROBES = 16  # recent blocks to search
_ROWS_NBYTES = 4 << 20  # of a shard, read at once
_MAX_REGIONS = 1 << 16  # cached at a time
_MIN_REDUNDANCY = 1.5  # below this, sharing reads costs more than it saves


class ShardReader:
    """Reads whole tensors from shards in several folders, local folders first.

    A damaged or unreadable block is read from another shard that contains it. `complete`: whether
    the folders are known to hold every element.
    """

    def __init__(
        self,
        index: ClusterIndex,
        folders: FolderCache | Sequence[Folder],
        *,
        local: Collection[int],
        rotation: int,
        complete: bool,
        policy: ReadPolicy | None = None,
    ) -> None:
        self.verification = VerificationLog()
        self._policy = policy or ReadPolicy()
        self._index, self._folders = index, folders
        self._rotation, self._is_complete = rotation, complete
        self._local = frozenset(local)
        self._locations: dict[int, LocationTable] = {}  # by folder
        self._lock = threading.Lock()  # a read-ahead thread and its owner both read
        self._edges: dict[int, list[int]] = {}  # by layout
        # By layout and window: most layouts have many tensors.
        self._tilings: dict[tuple[int, Box], list[Region]] = {}
        self._region_count = 0  # in `_tilings`
        self._tensor: Key | None = None  # read last
        # Blocks of that tensor of which a part was read: each row crosses several regions.
        self._blocks: OrderedDict[tuple[int, bool, Box, int], tuple[bytes, SlabRange | None]] = (
            OrderedDict()
        )

    def _co_readers(self) -> Mapping[int, Sequence[int]]:
        """Return by folder: its numbers on several nodes, of which one reads each block for all.

        "auto" shares where nodes need the same bytes and the file system is slow.
        """
        mode, redundancy = self._policy.share_reads, self._policy.redundancy
        if mode == "never" or (mode == "auto" and redundancy < _MIN_REDUNDANCY):
            return {}
        return self._sharing_folders

    @cached_property
    def _sharing_folders(self) -> Mapping[int, Sequence[int]]:
        by_folder_id = group_by_value(
            (number, folder.folder_id) for number, folder in enumerate(self._index.folders)
        )
        return {
            number: numbers
            for folder_id, numbers in by_folder_id.items()
            if len(numbers) > 1 and self._may_share(folder_id.partition(" ")[0])
            for number in numbers
        }

    def _may_share(self, file_system: str) -> bool:
        """Return whether nodes read folders of this file system for each other; "": unknown."""
        return bool(file_system) and (self._policy.share_reads == "always" or is_slow(file_system))

    @property
    def _verifies(self) -> bool:
        return self._policy.verify != "off"

    def _read_order(
        self, holders: Sequence[tuple[int, bool]], stored_key: Key, block: int
    ) -> Sequence[tuple[int, bool]]:
        """Return the holders, starting with the one that reads this block for all."""
        co_readers = self._co_readers().get(holders[0][0], ())
        sharing = sorted(holder for holder in holders if holder[0] in co_readers)
        if len(sharing) < 2:
            return holders
        first = sharing[zlib.crc32(f"{':'.join(stored_key)}/{block}".encode()) % len(sharing)]
        return [first, *(holder for holder in holders if holder != first)]

    def read_into(self, key: Key, start: int, buffer: Buffer) -> None:
        """Fill `buffer` from byte `start` of a tensor. IntegrityError if no copy is intact."""
        with self._lock:
            if self._tensor != key:
                self._tensor = key
                self._blocks.clear()
            elif len(buffer) < LONG_RUN_NBYTES and self._read_from_cache(start, buffer):
                return
            filled_nbytes = self._read_tensor(key, start, buffer, frozenset(), [])
            if filled_nbytes != len(buffer):
                raise IntegrityError(
                    f"{':'.join(key)}: {filled_nbytes} of {len(buffer)} bytes from byte {start} "
                    "are in the folders, expected all of them"
                )

    def nbytes(self, key: Key) -> int | None:
        """Return the size of a tensor in bytes, or None if no folder has any of it."""
        return self._index.specs[key].nbytes if key in self._index.specs else None

    def _regions(self, key: Key, window: Box, corrupt: frozenset[Box]) -> list[Region]:
        """Return disjoint regions that cover a window, except what only `corrupt` boxes hold.

        Local boxes come first, then larger ones. Windows between the same edges share regions.
        """
        number = self._index.layout_numbers[key]
        if number not in self._edges:
            self._edges[number] = self._index.layout(key).edges()
        window = snap_to_edges(window, self._edges[number])
        if corrupt or (number, window) not in self._tilings:
            tiling = self._tile_window(self._index.layout(key), window, corrupt)
            if corrupt:
                return tiling
            self._region_count += len(tiling)
            if self._region_count > _MAX_REGIONS:
                self._tilings, self._region_count = {}, len(tiling)
            self._tilings[number, window] = tiling
        return self._tilings[number, window]

    def _tile_window(
        self, layout: ShardLayout, window: Box, corrupt: frozenset[Box]
    ) -> list[Region]:
        rows = (window.offsets[0], window.offsets[0] + window.shape[0]) if window.shape else (0, 1)
        by_box = group_by_value(
            ((folder, is_shard), box)
            for box, folder, is_shard in layout.boxes_in_rows(*rows)
            if box not in corrupt
        )
        holders = {
            box: sorted(box_holders, key=self._preference) for box, box_holders in by_box.items()
        }
        overlaps = {
            box: overlap for box in holders if (overlap := intersect(box, window)) is not None
        }
        covered = sum(overlap.numel for overlap in overlaps.values())
        if self._is_complete and not corrupt and covered == window.numel:  # no two boxes overlap
            return [Region(overlap, box, holders[box]) for box, overlap in overlaps.items()]
        regions, remaining = [], [window]
        for box in sorted(
            overlaps,
            key=lambda box: (holders[box][0][0] not in self._local, -box.numel, box.offsets),
        ):
            regions += [
                Region(overlap_box, box, holders[box])
                for rest in remaining
                if (overlap_box := intersect(rest, box)) is not None
            ]
            remaining = [part_box for rest in remaining for part_box in subtract_box(rest, box)]
            if not remaining:
                break
        return regions

    def _preference(self, holder: tuple[int, bool]) -> tuple[bool, int]:
        return holder[0] not in self._local, (holder[0] + self._rotation) % len(self._index.folders)

    def _read_tensor(
        self, key: Key, start: int, buffer: Buffer, corrupt: frozenset[Box], errors: list[str]
    ) -> int:
        """Fill `buffer` from byte `start` of a tensor, except from `corrupt` boxes.

        Returns the number of bytes filled. `errors`: what was wrong with the corrupt boxes.
        """
        spec = self._index.specs[key]
        if not len(buffer):
            return 0
        item_nbytes = spec.nbytes // full_box(spec.shape).numel
        stop, filled_nbytes = start + len(buffer), 0
        window = enclosing_rows(spec, start, stop)
        regions = self._regions(key, window, corrupt)
        for region in regions:
            overlap = intersect(region.box, window)
            assert overlap is not None  # no edge lies within a region, and the window touches it
            stored_nbytes, max_blocks = region.stored_box.numel * item_nbytes, len(regions) + 1
            copies = ShardCopies(key, spec, region, stored_nbytes, corrupt, errors, max_blocks)
            inner, outer = split_whole_rows(overlap, spec, start, stop)
            if inner is not None and self._read_rows(copies, inner, start, buffer):
                filled_nbytes += inner.numel * item_nbytes
            elif inner is not None:
                outer = [overlap]
            for box in outer:
                local = relative_to(box, region.stored_box.offsets)
                for first, shard_offset, count in runs(
                    box, spec.shape, local=local, local_shape=region.stored_box.shape
                ):
                    low = max(first * item_nbytes, start)
                    high = min((first + count) * item_nbytes, stop)
                    if low < high:
                        shard_start = (shard_offset - first) * item_nbytes + low
                        target = buffer[low - start : high - start]
                        self._read_shard_range(copies, shard_start, target, tensor_start=low)
                        filled_nbytes += high - low
        return filled_nbytes

    def _read_rows(self, copies: ShardCopies, box: Box, start: int, buffer: Buffer) -> bool:
        """Read whole rows of a box and copy them to their places. False if a block is lost."""
        spec, stored_box = copies.spec, copies.region.stored_box
        item_nbytes = spec.nbytes // full_box(spec.shape).numel
        row_nbytes = spec.nbytes // spec.shape[0]
        stored_row_nbytes = copies.nbytes // stored_box.shape[0]
        target = np.frombuffer(buffer, dtype=np.uint8)
        max_rows = max(_ROWS_NBYTES // stored_row_nbytes, 1)
        for first in range(box.offsets[0], box.offsets[0] + box.shape[0], max_rows):
            count = min(max_rows, box.offsets[0] + box.shape[0] - first)
            stored_rows = np.empty(count * stored_row_nbytes, dtype=np.uint8)
            shard_start = (first - stored_box.offsets[0]) * stored_row_nbytes
            if not self._read_shard_range(copies, shard_start, stored_rows.data):
                return False
            destination = target[
                first * row_nbytes - start : (first + count) * row_nbytes - start
            ].reshape(count, *spec.shape[1:], item_nbytes)
            source = stored_rows.reshape(count, *stored_box.shape[1:], item_nbytes)
            stored_slices = relative_to(box, stored_box.offsets).slices
            destination[:, *box.slices[1:]] = source[:, *stored_slices[1:]]
        return True

    def _read_shard_range(
        self, copies: ShardCopies, start: int, buffer: Buffer, *, tensor_start: int | None = None
    ) -> bool:
        """Read bytes from `start` of a shard, each block from the first holder that has it intact.

        A block that no holder has intact is read from overlapping boxes if the bytes are contiguous
        in the tensor, from byte `tensor_start`. Otherwise it ends the read: returns False.
        """
        for position, target in split_by_block(copies, start, buffer):
            errors: list[str] = []
            is_read = self._read_within_block(copies, position, target, errors)
            if not is_read and tensor_start is not None:
                corrupt = copies.corrupt | {copies.region.stored_box}
                all_errors, first = [*copies.errors, *errors], tensor_start + position - start
                if self._read_tensor(copies.key, first, target, corrupt, all_errors) < len(target):
                    raise IntegrityError(format_list("no node has these bytes intact", all_errors))
                is_read = True
            self._report(errors)
            if not is_read:
                return False
        return True

    def _read_within_block(
        self, copies: ShardCopies, position: int, buffer: Buffer, errors: list[str]
    ) -> bool:
        """Read bytes of one block of a shard. False if no holder has it intact."""
        block = position // digests.BLOCK_NBYTES
        low = block * digests.BLOCK_NBYTES
        high = min((block + 1) * digests.BLOCK_NBYTES, copies.nbytes)
        if (position, position + len(buffer)) == (low, high):
            return self._read_block(copies, block, buffer, errors)
        block_bytes = self._cached_block(copies, block, high - low, errors)
        if block_bytes is not None:
            buffer[:] = block_bytes[position - low : position - low + len(buffer)]
        return block_bytes is not None

    def _read_from_cache(self, start: int, buffer: Buffer) -> bool:
        """Fill `buffer` from a recently cached block. False if none has the bytes."""
        for block_id, (block_bytes, slab_range) in islice(
            reversed(self._blocks.items()), _CACHE_PROBES
        ):
            position = slab_range.position(start, len(buffer)) if slab_range is not None else None
            offset = -1 if position is None else position - block_id[-1] * digests.BLOCK_NBYTES
            if 0 <= offset <= len(block_bytes) - len(buffer):
                buffer[:] = block_bytes[offset : offset + len(buffer)]
                self._blocks.move_to_end(block_id)
                return True
        return False

    def _cached_block(
        self, copies: ShardCopies, block: int, nbytes: int, errors: list[str]
    ) -> bytes | None:
        """Return a whole block and cache it: the rest of it is usually needed soon."""
        block_id = (*copies.region.holders[0], copies.region.stored_box, block)
        if block_id not in self._blocks:
            buffer = bytearray(nbytes)
            if not self._read_block(copies, block, memoryview(buffer), errors):
                return None
            self._blocks[block_id] = (
                bytes(buffer),
                slab_range_of(copies.region.stored_box, copies.spec),
            )
            while len(self._blocks) > min(copies.max_cached_blocks, _MAX_BLOCKS):
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(block_id)
        return self._blocks[block_id][0]

    def _read_block(
        self, copies: ShardCopies, block: int, buffer: Buffer, errors: list[str]
    ) -> bool:
        """Read one block from the first holder that has it intact. Others add to `errors`."""
        first_key = copies.stored_key(is_shard=copies.region.holders[0][1])
        for number, is_shard in self._read_order(copies.region.holders, first_key, block):
            stored_key = copies.stored_key(is_shard=is_shard)
            try:
                locations = self._locations_in(number)
                saved_digests = locations.digests(stored_key) if self._verifies else None
                location = locations.location(stored_key) or locations.load_locations(
                    self._folders[number], partial(self._index.keys_in_folder, number), stored_key
                )
                locations.storage.read_at(
                    location.file, location.start + block * digests.BLOCK_NBYTES, buffer
                )
            except CheckpointError as error:
                errors.append(str(error))
                continue
            if saved_digests is None or (
                block < len(saved_digests) and int(saved_digests[block]) == digests.crc(buffer)
            ):
                if saved_digests is not None:
                    self.verification.verified_nbytes += len(buffer)
                return True
            has_digest = block < len(saved_digests)
            expected = (
                f"{int(saved_digests[block]):016x}" if has_digest else "a block with a digest"
            )
            errors.append(
                f"{locations.storage.root}/{location.file}: block {block} of "
                f"{':'.join(stored_key)} has CRC {digests.crc(buffer):016x}, "
                f"expected {expected}"
            )
        return False

    def _report(self, errors: Sequence[str]) -> None:
        """Log each error once, and as a warning."""
        for text in errors:
            if text not in self.verification.damage:
                self.verification.damage.append(text)
                _LOG.warning("read from another node: %s", text)

    def _locations_in(self, number: int) -> LocationTable:
        """Return the locations of a folder, with its digests if blocks are verified.

        The folder itself may be evicted and opened again; see `FolderCache`.
        """
        if number not in self._locations:
            folder, keys = self._folders[number], self._index.keys_in_folder(number)
            locations = LocationTable(folder.storage, keys)
            if self._verifies:
                locations.load_digests(folder, keys)
            self._locations[number] = locations
        return self._locations[number]
