"""Collects the elements that encodings cannot hold, from all ranks.

A value could be lost if a rank forgot one. So whoever encodes elements examines them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from unified_ckpt.core.nodes.node_groups import base_part, parse_shard_key
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.encode.encoder import LocalOutliers
from unified_ckpt.engine.plan.chunks import CHUNK_NBYTES, chunks
from unified_ckpt.format.outliers import (
    Elements,
    encode_outliers,
    is_too_many,
    join_elements,
    parse_outliers,
)
from unified_ckpt.runtime.comm.collective import Collective

OutliersByPart = dict[str, dict[str, Elements]]  # part -> name -> elements


def _by_part(outliers: LocalOutliers) -> OutliersByPart:
    """Return the elements of each whole tensor, joined, with flat indices in it."""
    by_tensor: dict[Key, list[Elements]] = {}
    for key, elements in outliers:
        if len(elements[0]):
            whole_key, in_whole = _in_whole_tensor(key, elements)
            by_tensor.setdefault(whole_key, []).append(in_whole)
    by_part: OutliersByPart = {}
    for (part, fqn), pieces in by_tensor.items():
        by_part.setdefault(part, {})[fqn] = join_elements(pieces)
    return by_part


def _in_whole_tensor(key: Key, elements: Elements) -> tuple[Key, Elements]:
    """Return elements of a shard as those of its tensor; others are returned unchanged."""
    shard = parse_shard_key(key)
    if shard is None:
        return key, elements
    (fqn, box, shape), (indices, values) = shard, elements
    in_box = np.unravel_index(indices, box.shape)
    in_tensor = tuple(i + n for i, n in zip(in_box, box.offsets, strict=True))
    whole_indices = np.ravel_multi_index(in_tensor, shape).astype(np.int64)
    return (base_part(key[0]), fqn), (whole_indices, values)


def collect_outliers(
    collective: Collective, outliers: LocalOutliers, shapes: Mapping[Key, Sequence[int]]
) -> tuple[OutliersByPart, int]:
    """Collective. Return on rank 0 the outliers of all ranks, and everywhere their number.

    `outliers`: of this rank, in any order. `shapes`: on rank 0, those of all encoded tensors.
    """
    bodies = outlier_files(_by_part(outliers))
    sizes = _put_files(collective, f"outliers/{collective.rank}", bodies)
    ranks = range(collective.world)
    sizes_by_rank = collective.collect_json("outlier-sizes", sizes, dst=0, ranks=ranks)
    shapes_by_part: dict[str, dict[str, Sequence[int]]] = {}
    for (part, fqn), shape in shapes.items():
        shapes_by_part.setdefault(part, {})[fqn] = shape
    gathered: LocalOutliers = []
    for rank, sizes in enumerate(sizes_by_rank):
        for part, body in _get_files(collective, f"outliers/{rank}", sizes).items():
            label = f"outliers of rank {rank}"
            for fqn, elements in parse_outliers(body, shapes_by_part[part], file=label).items():
                gathered.append(((part, fqn), elements))
    by_part = _by_part(gathered)
    total = sum(len(indices) for found in by_part.values() for indices, _ in found.values())
    return by_part, collective.broadcast_json("outlier-count", total)


def outlier_files(outliers: OutliersByPart) -> dict[str, bytes]:
    """Return the content of the outliers file of each part that has any."""
    return {part: encode_outliers(elements) for part, elements in outliers.items()}


def broadcast_files(collective: Collective, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return rank 0's outliers files. Some other ranks call, too; rank 0 waits for none."""
    sizes: dict[str, int] = {}
    if collective.rank == 0:
        sizes = _put_files(collective, "outliers-of-all", files)
    sizes = collective.broadcast_json("outliers-of-all-sizes", sizes)
    return _get_files(collective, "outliers-of-all", sizes)


def _put_files(collective: Collective, key: str, files: Mapping[str, bytes]) -> dict[str, int]:
    """Set the keys `key`/0 and so on, and return the bytes of each part."""
    joined = b"".join(files.values())
    pieces = chunks(0, len(joined))  # the store limits the bytes of a value
    for number, (start, stop) in enumerate(pieces):
        collective.put(f"{key}/{number}", joined[start:stop])
    return {part: len(body) for part, body in files.items()}


def _get_files(collective: Collective, key: str, sizes: Mapping[str, int]) -> dict[str, bytes]:
    """Return the files that some rank sends with `_put_files`. `sizes`: what that returned."""
    count = -(-sum(sizes.values()) // CHUNK_NBYTES)
    joined = b"".join(collective.get(f"{key}/{number}") for number in range(count))
    ends = accumulate(sizes.values())
    return {
        part: joined[end - nbytes : end]
        for (part, nbytes), end in zip(sizes.items(), ends, strict=True)
    }


def has_too_many(outliers: OutliersByPart, shapes: Mapping[Key, Sequence[int]]) -> bool:
    """Return whether a tensor would now be stored plain. `shapes`: of all encoded tensors."""
    return any(
        is_too_many(len(indices), shapes[part, fqn])
        for part, found in outliers.items()
        for fqn, (indices, _) in found.items()
    )
