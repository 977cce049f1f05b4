"""Copies the bytes that this rank writes or sends to I/O ranks, so that training can continue.

A snapshot could hold wrong bytes if the next one overwrote it before it is written, or if the
caller changed a tensor during the copy. So a rank starts a save only after its last one has ended,
and copies tensors before the call returns (or before the optimizer's next step). Tiles are
exchanged later, from the copies.

With a limit for the memory, the tensors that are written first are not copied. They are written
while the caller waits; see `TensorHold`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from unified_ckpt.core.planning.exchange import Extent, TileRange
from unified_ckpt.core.planning.slabs import SMALL_NBYTES
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import human_size
from unified_ckpt.engine.encode.agree import encoded_tensor
from unified_ckpt.engine.encode.encoder import encoder_of
from unified_ckpt.engine.plan.group_plan import GroupPlan
from unified_ckpt.engine.save.write.tiles import SlabCopy, slab_copies
from unified_ckpt.errors import StorageError
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.topology import free_memory_nbytes
from unified_ckpt.runtime.exchange.run_batch import RunBatch, copy_runs_to_tile
from unified_ckpt.runtime.torch_state.devices import HostCopies, host_memory
from unified_ckpt.runtime.torch_state.tensors import (
    LocalTensor,
    torch_dtype,
)

_ALIGN_NBYTES = 64  # of each copy in the memory: suits any dtype and whole cache lines


class SnapshotMemory:
    """Host memory that snapshots reuse; pinned if tensors are on a CUDA device."""

    def __init__(self) -> None:
        self._memory, self._pinned = host_memory(0, pinned=False), False
        self.last_snapshot: Snapshot | None = None  # without its tensors

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return self._memory.numel()

    def reserve(self, nbytes: int, *, pinned: bool, threads: int = 1) -> torch.Tensor:
        """Return at least `nbytes` of memory, uint8. `threads` allocate what is pinned."""
        if self._memory.numel() < nbytes or (pinned and not self._pinned):
            self._memory = host_memory(0, pinned=False)  # free the old before allocating the new
            self._memory, self._pinned = host_memory(nbytes, pinned=pinned, threads=threads), pinned
        return self._memory

    def close(self) -> None:
        """Free the memory."""
        self._memory, self._pinned = host_memory(0, pinned=False), False
        self.last_snapshot = None


@dataclass(frozen=True, slots=True)
class GroupCopy:
    """Where the copies of one group are.

    `extent_offsets` are bytes of the snapshot's memory, by index of the extent. `slabs` are by
    index in the group. `plan` counts slabs as a rank would whose tensors are the copies.
    `uncopied`: tensors that are written from the caller's memory, by index in the group.
    """

    extent_offsets: Mapping[int, int]
    slabs: Mapping[int, SlabCopy]
    plan: GroupPlan
    uncopied: frozenset[int]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The tensors to copy, by group, and their `copies` in `memory`."""

    rank: int
    groups: Sequence[GroupPlan]
    tensors_by_group: Sequence[Sequence[LocalTensor]]
    memory: torch.Tensor
    copies: Sequence[GroupCopy]
    host_nbytes: int | None

    @property
    def last_uncopied_group(self) -> int:
        """The index of the last group with tensors that are not copied; -1 if all are."""
        return max(
            (index for index, group_copy in enumerate(self.copies) if group_copy.uncopied),
            default=-1,
        )

    def is_uncopied(self, group_index: int, extent: Extent) -> bool:
        """Return whether an extent of a group is written from the caller's memory."""
        return extent.decl_index in self.copies[group_index].uncopied

    def uncopied_keys(self) -> set[Key]:
        """Return the tensors that are written from the caller's memory."""
        return {
            group.decls[decl_index].key
            for group, group_copy in zip(self.groups, self.copies, strict=True)
            for decl_index in group_copy.uncopied
        }

    def extents(self, group_index: int) -> Iterator[tuple[Extent, Sequence[torch.Tensor]]]:
        """Return each copied extent of a group with the memory of its planes."""
        group = self.groups[group_index]
        for index, offset in self.copies[group_index].extent_offsets.items():
            extent = group.rank_io.extents[index]
            sizes = plane_sizes(group, extent)
            yield extent, torch.split(self.memory[offset : offset + sum(sizes)], list(sizes))

    def copied_extents(self, group_index: int) -> list[tuple[Extent, LocalTensor]]:
        """Return each copied extent of a group with its copy, as `write_extents` takes them."""
        copies = []
        for extent, memory in self.extents(group_index):
            decl = self.groups[group_index].decls[extent.decl_index]
            dtypes = torch_dtype(decl.spec.dtype), torch.bfloat16
            planes = (plane.view(dtype) for plane, dtype in zip(memory, dtypes, strict=False))
            copies.append((replace(extent, local_offset=0), encoded_tensor(decl, *planes)))
        return copies


def plane_sizes(group: GroupPlan, extent: Extent) -> tuple[int, ...]:
    """Return the bytes of each plane of an extent, which are copied one after the other."""
    return encoder_of(group, extent.decl_index).plane_sizes(extent.stop - extent.start)


def prepare_snapshot(
    collective: Collective,
    groups: Sequence[GroupPlan],
    tensors_by_group: Sequence[Sequence[LocalTensor]],
    snapshot_memory: SnapshotMemory,
    *,
    host_nbytes: int | None,
    threads: int,
) -> Snapshot:
    """Allocate a snapshot without copying. StorageError if the memory does not suffice.

    The memory must be unused: the last snapshot of this rank is written. `host_nbytes` limits it;
    what is written first is then not copied.
    """
    last_snapshot, rank = snapshot_memory.last_snapshot, collective.rank
    if (
        last_snapshot is not None
        and last_snapshot.groups is groups
        and last_snapshot.host_nbytes == host_nbytes
    ):
        return replace(last_snapshot, tensors_by_group=tensors_by_group)
    snapshot_memory.last_snapshot = None
    slabs_by_group = [
        slab_copies(group, tensors, rank=rank)
        for group, tensors in zip(groups, tensors_by_group, strict=True)
    ]
    uncopied = _select_uncopied(groups, slabs_by_group, host_nbytes)
    total, copies = 0, list[GroupCopy]()
    for group, slabs, group_uncopied in zip(groups, slabs_by_group, uncopied, strict=True):
        group_copy, total = _allocate_group(group, slabs, group_uncopied, total, rank=rank)
        copies.append(group_copy)
    pinned = any(
        plane.local.device.type == "cuda"
        for tensors in tensors_by_group
        for tensor in tensors
        for plane in tensor.planes
    )
    _check_memory(total - snapshot_memory.nbytes)
    memory = snapshot_memory.reserve(total, pinned=pinned, threads=threads)
    snapshot = Snapshot(rank, groups, tensors_by_group, memory, copies, host_nbytes)
    snapshot_memory.last_snapshot = replace(snapshot, tensors_by_group=())
    return snapshot


def _select_uncopied(
    groups: Sequence[GroupPlan],
    slabs_by_group: Sequence[Mapping[int, SlabCopy]],
    host_nbytes: int | None,
) -> list[frozenset[int]]:
    """Return the tensors of each group for which the memory does not suffice.

    The last tensors get the memory: the caller waits until the others are written.
    """
    uncopied: list[frozenset[int]] = [frozenset()] * len(groups)
    free_nbytes = host_nbytes
    for group_index in reversed(range(len(groups) if free_nbytes is not None else 0)):
        sizes: dict[int, int] = {}
        for extent in groups[group_index].rank_io.extents:
            nbytes = _align_up(sum(plane_sizes(groups[group_index], extent)))
            sizes[extent.decl_index] = sizes.get(extent.decl_index, 0) + nbytes
        for decl_index, slab_copy in slabs_by_group[group_index].items():
            sizes[decl_index] = sizes.get(decl_index, 0) + _align_up(slab_copy.nbytes)
        left = set()
        for decl_index in sorted(sizes, reverse=True):
            if sizes[decl_index] <= (free_nbytes or 0):
                free_nbytes = (free_nbytes or 0) - sizes[decl_index]
            else:
                left.add(decl_index)
        uncopied[group_index] = frozenset(left)
    return uncopied


def _allocate_group(
    group: GroupPlan,
    slabs: Mapping[int, SlabCopy],
    uncopied: frozenset[int],
    total: int,
    *,
    rank: int,
) -> tuple[GroupCopy, int]:
    """Place what this rank copies of a group from byte `total` on; also return the next free byte.

    These are its extents, and the slabs that it gives to tiles.
    """
    extent_offsets: dict[int, int] = {}
    for index, extent in enumerate(group.rank_io.extents):
        if extent.decl_index not in uncopied:
            extent_offsets[index] = total
            total += _align_up(sum(plane_sizes(group, extent)))
    placed: dict[int, SlabCopy] = {}
    for decl_index, slab_copy in slabs.items():
        if decl_index not in uncopied:
            placed[decl_index] = replace(slab_copy, offset=total)
            total += _align_up(slab_copy.nbytes)

    def renumber(tile_range: TileRange) -> TileRange:
        if rank not in tile_range.members or tile_range.decl_index in uncopied:
            return tile_range
        slab_index = placed[tile_range.decl_index].slab_index(tile_range.first_local_slab)
        return tile_range._replace(first_local_slab=slab_index)

    tiles = (
        replace(tile, ranges=tuple(map(renumber, tile.ranges)))
        for tile in group.rank_io.member_tiles
    )
    rank_io = replace(group.rank_io, member_tiles=tuple(tiles))
    plan = replace(group, rank_io=rank_io)
    return GroupCopy(extent_offsets, placed, plan, uncopied), total


def _align_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES


def _check_memory(nbytes: int) -> None:
    free = free_memory_nbytes()
    if free is not None and nbytes > free:
        raise StorageError(
            f"snapshot: got {human_size(free)} of free memory on this rank, expected "
            f"{human_size(nbytes)}; free {human_size(nbytes - free)}, or call `save`, which needs "
            "none"
        )


def copy_tensors(snapshot: Snapshot, keys: Collection[Key], *, threads: int = 1) -> None:
    """Copy the tensors with these keys; they may change afterwards."""
    with HostCopies(threads=threads) as copies:
        for group_index, tensors in enumerate(snapshot.tensors_by_group):
            slabs = [
                (tensors[decl_index], slab_copy)
                for decl_index, slab_copy in snapshot.copies[group_index].slabs.items()
                if tensors[decl_index].decl.key in keys
            ]
            _copy_for_tiles(snapshot, slabs, copies)
            for extent, memory in snapshot.extents(group_index):
                tensor = tensors[extent.decl_index]
                if tensor.decl.key in keys:
                    encoder = encoder_of(snapshot.groups[group_index], extent.decl_index)
                    offsets = encoder.plane_sizes(extent.local_offset)
                    for plane, data, offset in zip(tensor.planes, memory, offsets, strict=True):
                        dtype = torch_dtype(plane.decl.spec.dtype)
                        copies.add_elements(data.view(dtype), plane, offset // dtype.itemsize)


def _copy_for_tiles(
    snapshot: Snapshot, slabs: Iterable[tuple[LocalTensor, SlabCopy]], copies: HostCopies
) -> None:
    """Copy the slabs that tensors of one group give to tiles; small tensors in batches."""
    batches = [RunBatch(snapshot.memory, copy_runs_to_tile, rank=snapshot.rank) for _ in "12"]
    for tensor, slab_copy in slabs:
        # One slab, copied whole. Of a declared box, each element is a slab.
        is_small = tensor.decl.spec.nbytes < SMALL_NBYTES and not slab_copy.outer_ndim
        if is_small and not any(plane.casts for plane in tensor.planes):
            offset = slab_copy.offset
            for run_batch, plane in zip(batches, tensor.planes, strict=False):
                run_batch.append(offset, plane.local)
                offset += plane.local.nbytes
        else:
            for plane, data in zip(tensor.planes, slab_copy.data(snapshot.memory), strict=True):
                _copy_slabs(copies, data, plane, slab_copy)
    for run_batch in batches:
        run_batch.flush()


def _copy_slabs(
    copies: HostCopies, data: torch.Tensor, tensor: LocalTensor, slab_copy: SlabCopy
) -> None:
    flat, slab_numel = data.view(-1), prod(data.shape[1:])
    for first_slab, stop in slab_copy.spans:
        numel = (stop - first_slab) * slab_numel
        copies.add_elements(flat[:numel], tensor, first_slab * slab_numel)
        flat = flat[numel:]


def snapshot_tensors(snapshot: Snapshot, group_index: int) -> list[LocalTensor]:
    """Return the copies as local tensors, with slabs as `GroupCopy.plan` counts them.

    A tensor that is not copied is the caller's. One that gives no slab to a tile is empty.
    """
    group, slabs = snapshot.groups[group_index], snapshot.copies[group_index].slabs
    tensors = []
    for decl_index, decl in enumerate(group.decls):
        if decl_index in snapshot.copies[group_index].uncopied:
            tensors.append(snapshot.tensors_by_group[group_index][decl_index])
        elif decl_index in slabs:
            planes, outer_ndim = (
                slabs[decl_index].data(snapshot.memory),
                slabs[decl_index].outer_ndim,
            )
            shape = planes[0].shape[1:]
            if outer_ndim:  # slabs are counted over `outer_ndim` dims
                shape = torch.Size((len(planes[0]), *(1,) * (outer_ndim - 1), *shape))
            tensors.append(encoded_tensor(decl, *(plane.view(shape) for plane in planes)))
        else:
            tensors.append(LocalTensor(decl, snapshot.memory[:0]))
    return tensors
