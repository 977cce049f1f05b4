"""Compare stored tensors that the target ties to one, by digest or else by content.

A tensor would be lost if the target took the first of two different ones silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import nbytes
from unified_ckpt.engine.load.match import Match
from unified_ckpt.engine.source.protocol import Source

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
    equal = []
    for match in matches:
        decl = match.target.decl
        key = (decl.part.partition("@")[0], decl.fqn)
        tied_names = tied.get(key, ())
        different = next(
            (
                tied_name
                for tied_name in tied_names
                if not _equal(match, tied_name, source, rank=rank, use_digests=use_digests)
            ),
            None,
        )
        if different is not None:
            pattern = different.rpartition("/")[0] or different
            differing[key] = (
                f"{key[0]}:{key[1]}: the target ties {match.name} and {different}, which differ "
                "in the checkpoint; untie them, or leave one out with "
                f"SourceOptions(rename=[{{'match': {pattern!r}, 'drop': True}}])"
            )
        elif tied_names:
            equal.append(f"{key[0]}:{key[1]}")
    return differing, equal


def _equal(match: Match, tied_name: str, source: Source, *, rank: int, use_digests: bool) -> bool:
    """Return whether two stored tensors are equal, as far as this rank can tell."""
    spec = match.target.decl.spec
    if source.specs(match.part, [tied_name])[tied_name] != spec:
        return False
    keys = (match.part, match.name), (match.part, tied_name)
    saved = source.block_digests(keys) if use_digests else dict.fromkeys(keys)
    first_digests, second_digests = saved[keys[0]], saved[keys[1]]
    if first_digests is not None and second_digests is not None:
        return list(first_digests) == list(second_digests)
    boxes = (
        chunk
        for box, _ in match.target.decl.sharding.boxes(rank, spec.shape)
        for chunk in _chunks(box, spec.dtype)
    )
    return all(
        source.read(match.part, match.name, box) == source.read(match.part, tied_name, box)
        for box in boxes
    )


def _chunks(box: Box, dtype: str) -> Iterator[Box]:
    """Split a box along dim 0 into boxes of at most _CHUNK_NBYTES, or of one row."""
    if not box.shape:
        yield box
        return
    rows = max(1, _CHUNK_NBYTES // max(1, nbytes(dtype, box.shape[1:])))
    for first in range(0, box.shape[0], rows):
        offsets = (box.offsets[0] + first, *box.offsets[1:])
        yield Box(offsets, (min(rows, box.shape[0] - first), *box.shape[1:]))
