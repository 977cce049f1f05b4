"""Draws how ranks hold boxes of a tensor, with numpy slices as the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

import unified_ckpt as uc

Region = tuple[slice, ...]


@dataclass(frozen=True)
class Tiling:
    """The regions of a tensor, which tile it, and the holders of each, which may be several.

    `flat`: regions are ranges of the flattened tensor, at most one for each rank. `margin`: padding
    around boxes in the local tensor.
    """

    shape: tuple[int, ...]
    regions: tuple[Region, ...]
    holders: tuple[tuple[int, ...], ...]
    flat: bool
    margin: int

    def held(self, rank: int) -> list[Region]:
        """Return the regions of a rank."""
        return [r for r, ranks in zip(self.regions, self.holders, strict=True) if rank in ranks]

    def target(self, rank: int, dtype: torch.dtype, fill: float) -> uc.Shards:
        """Return a local tensor with the boxes of a rank, all elements `fill`."""
        held, margin, ndim = self.held(rank), self.margin, len(self.shape)
        if self.flat:
            (span,) = held[0] if held else (slice(0, 0),)
            local = torch.full((span.stop - span.start,), fill, dtype=dtype)
            return uc.Shards.flat(local, self.shape, span.start)
        sizes = [tuple(s.stop - s.start for s in region) for region in held]
        width = [margin + max((size[d] for size in sizes), default=0) for d in range(1, ndim)]
        rows = [sum(size[0] + margin for size in sizes)] if ndim else []
        boxes, low = list[Any](), 0
        for region, size in zip(held, sizes, strict=True):
            boxes.append(([s.start for s in region], [low, *[margin] * (ndim - 1)][:ndim], size))
            low += size[0] + margin if ndim else 0
        return uc.Shards(torch.full((*rows, *width), fill, dtype=dtype), self.shape, boxes)

    def expected(self, rank: int, array: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the elements of each region of a rank."""
        source = array.reshape(-1) if self.flat else array
        return [source[region] for region in self.held(rank)]

    def filled(self, rank: int, shards: uc.Shards) -> list[NDArray[Any]]:
        """Return views of the elements of each region in what `target` returned."""
        local = shards.tensor.numpy()
        if self.flat:
            return [local for _ in self.held(rank)]
        return [local[*each.local.slices, ...] for each in shards.boxes]

    def source(self, rank: int, array: NDArray[Any]) -> uc.Shards:
        """Return a local tensor with the boxes of a rank, filled from the whole tensor."""
        shards = self.target(rank, torch.from_numpy(array).dtype, -1)
        for view, values in zip(self.filled(rank, shards), self.expected(rank, array), strict=True):
            view[...] = values
        return shards

    def padding(self, shards: uc.Shards) -> NDArray[Any]:
        """Return the elements of the local tensor that belong to no box."""
        used = np.zeros(tuple(shards.tensor.shape), dtype=bool)
        for _, local in shards.boxes:
            used[local.slices] = True
        return shards.tensor.numpy()[~used]


@st.composite
def tilings(draw: st.DrawFn, world: int, shapes: st.SearchStrategy[tuple[int, ...]]) -> Tiling:
    """Draw cuts at random planes, or of the flattened tensor, and holders of each region."""
    shape, margin = draw(shapes), draw(st.sampled_from([0, 0, 1]))
    if draw(st.booleans()):
        numel = prod(shape)
        cuts = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=world - 1))})
        spans = [(slice(low, high),) for low, high in pairwise(cuts)]
        ranks = draw(st.permutations(range(world)))
        several = [[rank] for rank in ranks[: len(spans)]]
        for rank in ranks[len(spans) :]:
            if spans:
                several[draw(st.integers(0, len(spans) - 1))].append(rank)
        return Tiling(shape, tuple(spans), tuple(map(tuple, several)), flat=True, margin=0)
    regions = [tuple(slice(0, n) for n in shape)] if 0 not in shape else []
    for _ in range(draw(st.integers(0, 2 * world)) if shape and regions else 0):
        region = regions.pop(draw(st.integers(0, len(regions) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(region[dim].start, region[dim].stop))
        parts = [slice(region[dim].start, cut), slice(cut, region[dim].stop)]
        regions += [(*region[:dim], p, *region[dim + 1 :]) for p in parts if p.start < p.stop]
    sets = st.sets(st.integers(0, world - 1), min_size=1, max_size=draw(st.sampled_from([1, 2])))
    holders = [tuple(sorted(draw(sets))) for _ in regions]
    return Tiling(shape, tuple(regions), tuple(holders), flat=False, margin=margin)
