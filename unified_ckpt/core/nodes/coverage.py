"""Coverage: the regions of a tensor that a set of boxes leaves out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from unified_ckpt.core.sharding.boxes import Box, full_box, intersect


def coverage_gaps(shape: Sequence[int], boxes: Iterable[Box]) -> Iterator[Box]:
    """Yield the regions of a tensor that no box covers, as disjoint boxes.

    They are computed lazily: the first gap does not wait for the others.
    """
    distinct = {box for box in boxes if box.numel}
    tensor_box = full_box(shape)
    if tensor_box in distinct or tensor_box.numel == 0:
        return
    for spans in _gap_spans(distinct, shape, 0):
        yield Box(tuple(low for low, _ in spans), tuple(high - low for low, high in spans))


def _gap_spans(
    boxes: Collection[Box], shape: Sequence[int], dim: int
) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield the gaps as spans of `dim` and the dims after it.

    Sweeps along `dim`; between two edges of boxes, the later dims decide.
    """
    if not boxes:
        yield tuple((0, n) for n in shape[dim:])
    if not boxes or dim == len(shape):
        return
    pending = sorted(boxes, key=lambda box: box.offsets[dim], reverse=True)
    edges = {
        0,
        *(box.offsets[dim] for box in boxes),
        *(box.offsets[dim] + box.shape[dim] for box in boxes),
    } - {shape[dim]}
    active: list[Box] = []
    span_start = 0
    open_spans = list[tuple[tuple[int, int], ...]]()  # gaps in the later dims since `span_start`
    for edge in sorted(edges):
        active = [box for box in active if box.offsets[dim] + box.shape[dim] > edge]
        while pending and pending[-1].offsets[dim] == edge:
            active.append(pending.pop())
        inner_spans = (
            []
            if any(
                box.shape[dim + 1 :] == shape[dim + 1 :] and not any(box.offsets[dim + 1 :])
                for box in active
            )
            else list(_gap_spans(active, shape, dim + 1))
        )
        if inner_spans != open_spans:
            yield from (((span_start, edge), *rest) for rest in open_spans)
            span_start, open_spans = edge, inner_spans
    yield from (((span_start, shape[dim]), *rest) for rest in open_spans)


def subtract_box(box: Box, removed: Box) -> list[Box]:
    """Return `box` without the elements of `removed`, as disjoint boxes."""
    shared = intersect(box, removed)
    if shared is None:
        return [box]
    pieces: list[Box] = []
    offsets, shape = list(box.offsets), list(box.shape)
    for d in range(len(shape)):
        shared_stop = shared.offsets[d] + shared.shape[d]
        n_before = shared.offsets[d] - offsets[d]
        n_after = offsets[d] + shape[d] - shared_stop
        if n_before:
            pieces.append(Box(tuple(offsets), (*shape[:d], n_before, *shape[d + 1 :])))
        if n_after:
            after_offsets = (*offsets[:d], shared_stop, *offsets[d + 1 :])
            pieces.append(Box(after_offsets, (*shape[:d], n_after, *shape[d + 1 :])))
        offsets[d], shape[d] = shared.offsets[d], shared.shape[d]
    return pieces
