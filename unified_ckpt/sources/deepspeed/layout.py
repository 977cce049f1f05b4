"""Where the elements of each parameter lie in ZeRO's flat groups. Pure: numbers and names, no files.

Source of the layouts: DeepSpeed's `stage_1_and_2.py`, `bf16_optimizer.py` and `stage3.py`. Stages 1 and 2 put a group's parameters one
after another and cut that in equal partitions, one a rank. Stage 3 cuts each parameter in equal parts, and a rank has its parts one after
another.
The order of the parameters is that of `param_shapes`; the slices that the optimizer's files name are wrong under round-robin gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unified_ckpt.errors import FormatError

CUT_NUMEL = 4 << 20  # elements of one span: what is compared at once with the other copy


class Span(NamedTuple):
    """Elements [first, first + numel) of a flattened parameter: those from `start` of a rank's share of a group."""

    first: int
    numel: int
    rank: int
    group: int
    start: int


@dataclass(frozen=True, slots=True)
class Layout:
    """`spans`: by parameter. `partitions`: elements of each group on one rank. `used`: elements of each group that are some parameter's
    or lie between two; what a rank has beyond them is padding, which some versions leave out."""

    spans: Mapping[str, tuple[Span, ...]]
    partitions: tuple[int, ...]
    used: tuple[int, ...]

    def least(self, rank: int, group: int) -> int:
        """Elements that a rank must have of a group."""
        partition = self.partitions[group]
        return min(partition, max(0, self.used[group] - rank * partition))


def chained(
    groups: Sequence[Mapping[str, int]],
    gaps: Sequence[Sequence[int]],
    partitions: Sequence[int],
    *,
    world: int,
) -> Layout:
    """Of stages 1 and 2, and of BF16_Optimizer. `groups`: elements by parameter, in order; `gaps`: unused elements after each.

    FormatError where the partitions are not those of these parameters.
    """
    spans: dict[str, tuple[Span, ...]] = {}
    used = []
    _same_count(groups, partitions)
    for number, (numels, after, partition) in enumerate(zip(groups, gaps, partitions, strict=True)):
        if len(after) != len(numels):
            raise FormatError(
                f"group {number} has {len(numels)} parameters and {len(after)} paddings; needed one each"
            )
        at = 0
        for (name, numel), gap in zip(numels.items(), after, strict=True):
            spans[name] = tuple(_in_chain(at, numel, partition, number)) if partition else ()
            at += numel + gap
        slack = world * partition - at
        if not 0 <= slack < 2 * world:  # a group is padded to a multiple of 2 * world
            raise FormatError(
                f"group {number} has {world} partitions of {partition} elements; its parameters need {at}"
            )
        used.append(at)
    return Layout(spans, tuple(partitions), tuple(used))


def _in_chain(at: int, numel: int, partition: int, group: int) -> Iterator[Span]:
    """Elements [at, at + numel) of a group, by the ranks that have them."""
    done = 0
    while done < numel:
        rank, start = divmod(at + done, partition)
        count = min(numel - done, partition - start, CUT_NUMEL)
        yield Span(done, count, rank, group, start)
        done += count


def scattered(
    groups: Sequence[Mapping[str, int]], partitions: Sequence[int], *, world: int
) -> Layout:
    """Of stage 3. FormatError where the partitions are not those of these parameters."""
    spans: dict[str, tuple[Span, ...]] = {}
    _same_count(groups, partitions)
    for number, (numels, partition) in enumerate(zip(groups, partitions, strict=True)):
        start = 0
        for name, numel in numels.items():
            spans[name] = tuple(in_parts(numel, world=world, group=number, start=start))
            start += -(-numel // world)
        if start != partition:
            raise FormatError(
                f"group {number} has {partition} elements on each rank; its parameters need {start}"
            )
    return Layout(spans, tuple(partitions), tuple(world * partition for partition in partitions))


def in_parts(numel: int, *, world: int, group: int, start: int) -> Iterator[Span]:
    """A parameter that is cut in equal parts, the last ones padded. `start`: of each part in its rank's share."""
    part = -(-numel // world)
    for rank in range(world):
        done, stop = rank * part, min(numel, (rank + 1) * part)
        while done < stop:
            count = min(stop - done, CUT_NUMEL)
            yield Span(done, count, rank, group, start + done - rank * part)
            done += count


def _same_count(groups: Sequence[object], partitions: Sequence[object]) -> None:
    if len(groups) != len(partitions):
        raise FormatError(f"has {len(partitions)} groups; the model's file names {len(groups)}")
