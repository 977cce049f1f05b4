"""Copies runs of small whole tensors between a tile and their memory with few calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unified_ckpt.core.planning.exchange import Tile, TileRange
from unified_ckpt.runtime.torch_state.tensors import DTYPE_NAMES, LocalTensor


def tiles_by_number(tiles: Sequence[Tile]) -> dict[int, list[Tile]]:
    """Group tiles by number, in their order."""
    grouped: dict[int, list[Tile]] = {}
    for tile in tiles:
        grouped.setdefault(tile.number, []).append(tile)
    return grouped


class WholeTensors:
    """Collects adjacent tile ranges that are whole local tensors of one dtype and device.

    `copy` is called with the tile's memory of such a run and its tensors.
    """

    def __init__(
        self, memory: torch.Tensor, copy: Callable[[torch.Tensor, Sequence[torch.Tensor]], None]
    ) -> None:
        self._memory, self._copy = memory, copy
        self._locals: list[torch.Tensor] = []
        self._start = self._stop = 0

    def add(self, tile_range: TileRange, tensor: LocalTensor) -> bool:
        """Take a range that is a whole tensor in the stored dtype; False for any other range.

        The range is copied by the next `flush` at the latest.
        """
        local, spec = tensor.local, tensor.decl.spec
        is_whole = not tile_range.outer_ndim and local.shape == spec.shape
        if not is_whole or DTYPE_NAMES[local.dtype] != spec.dtype:
            return False
        last = self._locals[-1] if self._locals else local
        is_adjacent = tile_range.tile_offset == self._stop
        if not is_adjacent or last.dtype != local.dtype or last.device != local.device:
            self.flush()
        if not self._locals:
            self._start = tile_range.tile_offset
        self._locals.append(local)
        self._stop = tile_range.tile_offset + tile_range.stop - tile_range.start
        return True

    def flush(self) -> None:
        """Copy the collected run."""
        if self._locals:
            self._copy(self._memory[self._start : self._stop], self._locals)
            self._locals = []
