"""Compare stored tensors that the target ties to one, by digest or else by content.

A tensor would be lost if the target took the first of two different ones silently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unified_ckpt.core.sharding.boxes import chunk_boxes, shift
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.engine.load.match import Match
from unified_ckpt.engine.source.protocol import Source, read_box

_CHUNK_NBYTES = 16 << 20  # per read


def compare_tied(
    matches: Sequence[Match],
    tied: Mapping[Key, Sequence[str]],
    source: Source,
    *,
    rank: int,
    use_digests: bool,
) -> tuple[dict[Key, str], list[str]]:
    """Return {target: message} for tied targets whose stored tensors differ, and names of the rest.

    `tied`: for each target, other stored names in the part that is read. Without digests, each
    rank compares its own shard.
    """
    differing: dict[Key, str] = {}
    equal: dict[str, None] = {}  # a tensor may have several boxes
    for match in matches:
        key = match.target_key
        if key not in tied:
            continue
        different = next(
            (
                tied_name
                for tied_name in tied[key]
                if not _equal(match, tied_name, source, rank=rank, use_digests=use_digests)
            ),
            None,
        )
        if different is not None:
            pattern = different.rpartition("/")[0] or different
            differing[key] = (
                f"{key[0]}:{key[1]}: the target ties {match.stored_key[1]} and {different}, "
                "which differ in the checkpoint; untie them, or leave one out with "
                f"SourceOptions(rename=[{{'match': {pattern!r}, 'drop': True}}])"
            )
        else:
            equal[f"{key[0]}:{key[1]}"] = None
    return differing, list(equal)


def _equal(match: Match, tied_name: str, source: Source, *, rank: int, use_digests: bool) -> bool:
    """Return whether two stored tensors are equal, as far as this rank can tell."""
    spec = match.target.decl.spec
    part = match.stored_key[0]
    if source.specs(part, [tied_name])[tied_name] != spec:
        return False
    keys = match.stored_key, (part, tied_name)
    saved = source.block_digests(keys) if use_digests else dict.fromkeys(keys)
    first_digests, second_digests = saved[keys[0]], saved[keys[1]]
    if first_digests is not None and second_digests is not None:
        return list(first_digests) == list(second_digests)
    boxes = (
        shift(chunk, box.offsets)
        for box, _ in match.target.decl.sharding.boxes(rank, spec.shape)
        for chunk in chunk_boxes(box.shape, _CHUNK_NBYTES // itemsize(spec.dtype))
    )
    return all(read_box(source, keys[0], box) == read_box(source, keys[1], box) for box in boxes)
