"""Pieces of a tile that are whole tensors: small ones, of which a tile has many, copied between
tile and tensors by few calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unified_ckpt.core.planning.exchange import Tile, TileRange
from unified_ckpt.runtime.torch_state.tensors import DTYPE_NAMES, LocalTensor


def tiles_by_number(tiles: Sequence[Tile]) -> dict[int, list[Tile]]:
    """The tiles of each number, in their order."""
    grouped: dict[int, list[Tile]] = {}
    for tile in tiles:
        grouped.setdefault(tile.number, []).append(tile)
    return grouped


class WholeTensors:
    """Neighbouring pieces of a tile that are whole tensors of this rank, of one dtype and device:
    copied by one call.
    """

    def __init__(
        self, memory: torch.Tensor, copy: Callable[[torch.Tensor, Sequence[torch.Tensor]], None]
    ) -> None:
        self._memory, self._copy = memory, copy
        self._locals: list[torch.Tensor] = []
        self._start = self._stop = 0

    def add(self, piece: TileRange, part: LocalTensor) -> bool:
        """Whether the piece is such a one; it is copied then, by `flush` at the latest."""
        local = part.local
        if (
            piece.outer_ndim
            or local.shape != part.decl.spec.shape
            or DTYPE_NAMES[local.dtype] != part.decl.spec.dtype
        ):
            return False
        last = self._locals[-1] if self._locals else local
        if (
            piece.tile_offset != self._stop
            or last.dtype != local.dtype
            or last.device != local.device
        ):
            self.flush()
        if not self._locals:
            self._start = piece.tile_offset
        self._locals.append(local)
        self._stop = piece.tile_offset + piece.stop - piece.start
        return True

    def flush(self) -> None:
        if self._locals:
            self._copy(self._memory[self._start : self._stop], self._locals)
            self._locals = []
