"""Pieces of a tile that are whole tensors: small ones, of which a tile has many, copied between tile and tensors by few calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unified_ckpt.core.planning.exchange import Piece, Tile
from unified_ckpt.runtime.torch_state.tensors import DTYPE_NAMES, Part


def by_number(tiles: Sequence[Tile]) -> dict[int, list[Tile]]:
    """The tiles of each number, in their order."""
    found: dict[int, list[Tile]] = {}
    for tile in tiles:
        found.setdefault(tile.number, []).append(tile)
    return found


class Wholes:
    """Neighbouring pieces of a tile that are whole tensors of this rank, of one dtype and device: copied by one call."""

    def __init__(
        self, memory: torch.Tensor, copy: Callable[[torch.Tensor, Sequence[torch.Tensor]], None]
    ) -> None:
        self._memory, self._copy = memory, copy
        self._locals: list[torch.Tensor] = []
        self._start = self._stop = 0

    def take(self, piece: Piece, part: Part) -> bool:
        """Whether the piece is such a one; it is copied then, by `end` at the latest."""
        local = part.local
        if (
            piece.split
            or local.shape != part.row.spec.shape
            or DTYPE_NAMES[local.dtype] != part.row.spec.dtype
        ):
            return False
        last = self._locals[-1] if self._locals else local
        if piece.slot != self._stop or last.dtype != local.dtype or last.device != local.device:
            self.end()
        if not self._locals:
            self._start = piece.slot
        self._locals.append(local)
        self._stop = piece.slot + piece.stop - piece.start
        return True

    def end(self) -> None:
        if self._locals:
            self._copy(self._memory[self._start : self._stop], self._locals)
            self._locals = []
