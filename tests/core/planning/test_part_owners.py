"""The parts of a large save: counts and balance, never seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest

from tests.support.oracles import make_decl
from unified_ckpt.core.planning.exchange import RankIO
from unified_ckpt.core.planning.part_grid import GroupParts, PartedFile, StoredBytes
from unified_ckpt.core.planning.part_owners import assign_owners
from unified_ckpt.core.planning.part_plan import plan_parts
from unified_ckpt.core.planning.write_plan import StoredTensor, plan_files
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.shardings import ShardDim

HIDDEN, FFN, KV = 16384, 53248, 1024
HEADER_NBYTES = 10_000
LIMITS = {"model": 5_000_000_000, "optimizer": 5_000_000_000}
MIB = 1 << 20


def llama(layers: int, *, fsdp: int, tp: int) -> list[TensorDecl]:
    """Layers of Llama 3.1 405B in bfloat16 with two float32 moments, FSDP2 over TP."""
    dp = ShardDim(0, fsdp, tp)
    column, row = ((ShardDim(dim, tp, 1), dp) if tp > 1 else (dp,) for dim in (0, 1))
    decls = []
    for layer in range(layers):
        shapes = {
            "q": (HIDDEN, HIDDEN, column),
            "k": (KV, HIDDEN, column),
            "o": (HIDDEN, HIDDEN, row),
            "up": (FFN, HIDDEN, column),
            "down": (HIDDEN, FFN, row),
        }
        for name, (rows, columns, dims) in shapes.items():
            fqn = f"{layer:03}.{name}"
            decls.append(make_decl((rows, columns), *dims, dtype="BF16", fqn=fqn))
            decls += [
                make_decl((rows, columns), *dims, fqn=f"{fqn}/{state}", part="optimizer")
                for state in ("exp_avg", "exp_avg_sq")
            ]
        decls.append(make_decl((HIDDEN,), dp, dtype="BF16", fqn=f"{layer:03}.norm"))
    return sorted(decls, key=lambda decl: decl.key)


def parts_of(decls: list[TensorDecl], *, world: int, part_nbytes: int) -> GroupParts:
    holders = tuple(range(world))
    stored = [StoredTensor(n, *decl.key, decl.spec) for n, decl in enumerate(decls)]
    files = []
    for contents in plan_files(stored, holders=holders, limits=LIMITS):
        sizes = [decls[n].spec.nbytes for n in contents.stored_indices]
        ends = np.cumsum([HEADER_NBYTES, *sizes]).tolist()
        indices = contents.stored_indices
        files.append(PartedFile(HEADER_NBYTES, ends[-1], indices, tuple(ends[:-1])))
    return GroupParts(decls, list(map(StoredBytes, range(len(decls)))), files, holders, part_nbytes)


def count_plan(plan: RankIO) -> Counter[str]:
    tiles = (*plan.io_tiles, *plan.member_tiles)
    return Counter(
        extents=len(plan.extents),
        tiles=len(tiles),
        ranges=sum(len(tile.ranges) for tile in tiles),
    )


# Layers, FSDP, TP, replicas, MiB of a part: parts, least and most of a rank, peak over mean.
LARGE = {
    (2, 2048, 1, 1, 8): (5492, 2, 4, 1.49),
    (2, 128, 8, 1, 8): (5492, 4, 7, 1.31),
    (8, 16, 8, 8, 64): (2784, 1, 4, 1.49),
    (4, 256, 1, 8, 16): (5504, 1, 4, 1.49),
    (4, 8, 8, 1, 64): (1392, 21, 24, 1.07),
}


@pytest.mark.parametrize(("mesh", "expected"), LARGE.items(), ids=map(str, LARGE))
def test_parts_of_a_large_group(
    mesh: tuple[int, int, int, int, int], expected: tuple[int, int, int, float]
) -> None:
    layers, fsdp, tp, replicas, part_mib = mesh
    group = parts_of(
        llama(layers, fsdp=fsdp, tp=tp), world=fsdp * tp * replicas, part_nbytes=part_mib * MIB
    )
    owners = assign_owners(group)
    sizes = [stop - start for _, start, stop in map(group.part_range, range(len(owners)))]
    loads = np.bincount(owners, sizes, minlength=len(group.holders))
    counts = np.bincount(owners, minlength=len(group.holders))
    balance = round(float(loads.max() / loads.mean()), 2)
    assert (len(owners), int(counts.min()), int(counts.max()), balance) == expected


def test_plan_of_a_rank_does_not_grow_with_the_world() -> None:
    """A part of 64 MiB has 2,048 segments of other ranks: they are not listed."""
    sizes: Mapping[int, Counter[str]] = {
        world: count_plan(plan_parts(group, assign_owners(group), world // 2 + 1))
        for world in (64, 512, 2048)
        for group in [parts_of(llama(2, fsdp=world, tp=1), world=world, part_nbytes=64 * MIB)]
    }
    assert sizes[2048]["tiles"] <= sizes[512]["tiles"] <= sizes[64]["tiles"]
    assert sizes[2048]["ranges"] <= 4 * sizes[64]["ranges"], sizes
