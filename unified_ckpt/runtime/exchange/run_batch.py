"""Copies small shards between a tile or a snapshot and their memory with few calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unified_ckpt.core.planning.exchange import TILE_NBYTES, TileRange
from unified_ckpt.core.planning.slabs import only_run
from unified_ckpt.runtime.torch_state.tensors import DTYPE_NAMES, LocalTensor


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
