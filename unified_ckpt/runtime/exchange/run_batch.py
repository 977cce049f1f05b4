"""Copies small shards between a tile or a snapshot and their memory with few calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from unified_ckpt.core.planning.exchange import TILE_NBYTES, TileRange
from unified_ckpt.core.planning.slabs import only_run
from unified_ckpt.runtime.torch_state.tensors import (
    DTYPE_NAMES,
    LocalTensor,
    as_contiguous,
    as_int_bits,
)

# Copies a small tensor in 0.5 us, torch in 4. Keeps the interpreter's lock: released for each
# tensor, it would be gone to the threads that train.
_MEMMOVE = ctypes.PyDLL(None).memmove
_MEMMOVE.restype = None
_MEMMOVE.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class RunBatch:
    """Collects runs of one dtype and device, such as tile ranges of which `rank` holds one run.

    `copy` is called with the memory, the first byte of each run there, and its tensors.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        copy: Callable[[torch.Tensor, Sequence[int], Sequence[torch.Tensor]], None],
        *,
        rank: int,
    ) -> None:
        self._memory, self._copy, self._rank = memory, copy, rank
        self._starts: list[int] = []
        self._locals: list[torch.Tensor] = []

    def add(self, tile_range: TileRange, tensor: LocalTensor) -> bool:
        """Take a range of a whole tensor whose shard is one run of it, in the stored dtype.

        False for any other range. The range is copied by the next `flush` at the latest.
        """
        local, decl = tensor.local, tensor.decl
        if tile_range.outer_ndim or DTYPE_NAMES[local.dtype] != decl.spec.dtype:
            return False
        first = only_run(decl.spec.shape, decl.sharding, self._rank)
        if first is None:
            return False
        self.append(tile_range.tile_offset + first * local.element_size(), local)
        return True

    def append(self, start: int, local: torch.Tensor) -> None:
        """Take a tensor whose copy begins at byte `start`, which is after those taken before."""
        if self._locals and (
            self._locals[-1].dtype != local.dtype
            or self._locals[-1].device != local.device
            or start - self._starts[0] >= TILE_NBYTES
        ):
            self.flush()
        self._starts.append(start)
        self._locals.append(local)

    def flush(self) -> None:
        """Copy the collected runs."""
        if self._locals:
            self._copy(self._memory, self._starts, self._locals)
            self._starts, self._locals = [], []


def copy_runs_to_tile(
    tile: torch.Tensor, starts: Sequence[int], locals_: Sequence[torch.Tensor]
) -> None:
    """Copy tensors of one dtype and device to the tile, those of a device in one transfer.

    `starts`: the first byte of each, ascending.
    """
    if locals_[0].device.type != "cpu":
        flat = [as_int_bits(local.reshape(-1)) for local in locals_]
        locals_ = torch.split(torch.cat(flat).cpu(), [local.numel() for local in flat])
    memory = _memory_of_runs(tile, starts, locals_)
    for start, local in zip(starts, locals_, strict=True):
        row_major = as_contiguous(local)
        _MEMMOVE(memory + start, row_major.data_ptr(), row_major.nbytes)


def copy_runs_from_tile(
    tile: torch.Tensor, starts: Sequence[int], locals_: Sequence[torch.Tensor]
) -> None:
    """Copy from the tile into contiguous tensors: the inverse of `copy_runs_to_tile`."""
    memory = _memory_of_runs(tile, starts, locals_)
    if not all(local.is_contiguous() for local in locals_):
        raise ValueError("locals_: got a strided tensor, expected contiguous ones; copy by slabs")
    if locals_[0].device.type != "cpu":
        flat = [as_int_bits(local.view(-1)) for local in locals_]
        runs = [tile[i : i + local.nbytes] for i, local in zip(starts, flat, strict=True)]
        packed = torch.cat(runs).to(flat[0].device).view(flat[0].dtype)
        torch._foreach_copy_(flat, torch.split(packed, [local.numel() for local in flat]))
        return
    for start, local in zip(starts, locals_, strict=True):
        _MEMMOVE(local.data_ptr(), memory + start, local.nbytes)


def _memory_of_runs(
    tile: torch.Tensor, starts: Sequence[int], locals_: Sequence[torch.Tensor]
) -> int:
    """Return the address of the tile. ValueError if the last run ends beyond it."""
    stop = starts[-1] + locals_[-1].nbytes
    if stop > tile.nbytes:
        raise ValueError(f"tile: got {tile.nbytes} bytes, expected at least {stop}")
    return tile.data_ptr()
