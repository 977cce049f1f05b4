"""Machines that do not see each other's folder: what each can store whole, and what it can only store in fragments.

An island is the ranks of one machine, or of several that share a folder. A tensor of which an island holds a whole copy is stored there
as anywhere; of another, each box that a rank holds is a tensor of its own, a fragment, and several islands complete each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from unified_ckpt.core.geometry import Box, intersect, whole
from unified_ckpt.core.sharding import Cut, Sharding
from unified_ckpt.core.tables import Key

FRAGMENTS = "_fragments"  # ends the name of a part that holds fragments of another
_BOX = re.compile(r"(.*)@(\d+:\d+/\d+(?:,\d+:\d+/\d+)*)", re.DOTALL)


def island_rule(sharding: Sharding, members: Sequence[int], island: Sequence[int]) -> Sharding | None:
    """The rule among the ranks of an island, by index in `island`; None where they do not hold a whole copy between them.

    `members`: the ranks of the island that hold a part, as the rule counts ranks. A copy that the island holds in part is left out.
    """
    if not sharding.cuts:
        return sharding
    index = {rank: i for i, rank in enumerate(island)}
    at: dict[int, dict[tuple[int, ...], int]] = {}  # copy -> coordinates -> index
    for rank in members:
        position = sharding.position(rank)
        if position is not None:
            at.setdefault(sharding.origin(position), {})[sharding.coordinates(position)] = index[rank]
    sizes = [cut.size for cut in sharding.cuts]
    copies = [held for _, held in sorted(at.items()) if len(held) == prod(sizes)]
    if not copies:
        return None
    ranks = tuple(held[coordinates] for held in copies for coordinates in product(*(range(size) for size in sizes)))
    strides = [prod(sizes[i + 1 :]) for i in range(len(sizes))]
    cuts = tuple(Cut(c.dim, c.size, stride, c.sections, c.step, c.name) for c, stride in zip(sharding.cuts, strides, strict=True))
    return Sharding(cuts, ranks)


def fragment_name(fqn: str, box: Box, shape: Sequence[int]) -> str:
    """Rows 4 to 8 of the matrix `w` of 32 rows and 16 columns: `"w@4:8/32,0:16/16"`."""
    spans = zip(box.offsets, box.shape, shape, strict=True)
    return f"{fqn}@" + ",".join(f"{low}:{low + n}/{size}" for low, n, size in spans)


def parse_fragment(name: str) -> tuple[str, Box, tuple[int, ...]] | None:
    """The inverse: name, box and global shape of the tensor. None for a name that is no fragment's."""
    found = _BOX.fullmatch(name)
    if found is None:
        return None
    spans = [tuple(int(number) for number in re.split("[:/]", span)) for span in found[2].split(",")]
    if any(not low <= high <= size for low, high, size in spans):
        return None
    return found[1], Box(tuple(low for low, _, _ in spans), tuple(high - low for low, high, _ in spans)), tuple(n for _, _, n in spans)


def origin(key: Key) -> Key:
    """Part and name of the tensor that a fragment belongs to; the key itself of a tensor that is stored whole."""
    parsed = parse_fragment(key[1]) if key[0].endswith(FRAGMENTS) else None
    return key if parsed is None else (key[0].removesuffix(FRAGMENTS), parsed[0])


def uncovered(shape: Sequence[int], boxes: Iterable[Box]) -> list[Box]:
    """What of a tensor lies in none of the boxes, as boxes; empty when they cover it."""
    distinct = set(boxes)
    everything = whole(shape)
    if everything in distinct or everything.numel == 0:
        return []
    if sum(box.numel for box in distinct) == everything.numel and _disjoint(distinct):
        return []
    left = [everything]
    for box in sorted(distinct, key=lambda box: box.offsets):
        left = [piece for one in left for piece in without(one, box)]
    return left


def _disjoint(boxes: Iterable[Box]) -> bool:
    """Whether no two boxes share an element. Sweeps along dim 0: cheap for row blocks, which most boxes are."""
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets):
        open_boxes = [one for one in open_boxes if one.offsets[0] + one.shape[0] > box.offsets[0]]
        if any(intersect(one, box) is not None for one in open_boxes):
            return False
        open_boxes.append(box)
    return True


def without(box: Box, hole: Box) -> list[Box]:
    """The box less what it shares with the hole."""
    shared = intersect(box, hole)
    if shared is None:
        return [box]
    pieces: list[Box] = []
    offsets, shape = list(box.offsets), list(box.shape)
    for d in range(len(shape)):
        before, after = shared.offsets[d] - offsets[d], offsets[d] + shape[d] - shared.offsets[d] - shared.shape[d]
        if before:
            pieces.append(Box(tuple(offsets), (*shape[:d], before, *shape[d + 1 :])))
        if after:
            first = shared.offsets[d] + shared.shape[d]
            pieces.append(Box((*offsets[:d], first, *offsets[d + 1 :]), (*shape[:d], after, *shape[d + 1 :])))
        offsets[d], shape[d] = shared.offsets[d], shared.shape[d]
    return pieces


@dataclass(frozen=True, slots=True)
class Island:
    """Ranks that save together. `number`: among `count` islands; `ranks`: as the whole job counts them, ascending."""

    number: int
    count: int
    ranks: tuple[int, ...]
    world: int
